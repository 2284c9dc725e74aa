// @ts-check
/** The dark and the light theme: the system's choice, until the reader makes one. */

const KEY = "agentgym-theme";

/** @returns {boolean} whether the page is dark now */
export function isDark() {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

/** Switches between dark and light, and remembers it in this browser. */
export function switchTheme() {
  const next = isDark() ? "light" : "dark";
  document.documentElement.dataset.theme = next;
  try {
    localStorage.setItem(KEY, next);
  } catch {
    // A browser without storage forgets the choice.
  }
}
