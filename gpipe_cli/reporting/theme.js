// Light or dark: the system's choice until the reader uses the button.
function startTheme() {
  const root = document.documentElement, button = document.getElementById("theme");
  const system = matchMedia("(prefers-color-scheme: dark)");
  const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
  const tell = () => { button.textContent = dark() ? "light" : "dark"; };
  button.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    tell();
  });
  system.addEventListener("change", tell);
  tell();
}
