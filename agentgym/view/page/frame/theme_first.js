// Sets the chosen theme before the first paint; without a choice, the system's is used.
(function () {
  try {
    var chosen = localStorage.getItem("agentgym-theme");
    if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
  } catch (error) {
    // A browser without storage uses the system's theme.
  }
})();
