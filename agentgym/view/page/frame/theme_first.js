// Sets the chosen colors before the first paint; without a choice the system's are used.
(function () {
  try {
    var chosen = localStorage.getItem("agentgym-theme");
    if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  } catch (error) {
    // A browser that keeps nothing uses the system's colors.
  }
})();
