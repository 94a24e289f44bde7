// The page itself: head, tabs, theme. What is seen first is made first; completions are read when there is time.

const run = readData("run-data");
const view = new View(run.metrics.steps, run.resumes);
const browser = new GroupBrowser(run);

function themeButton() {
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const root = document.documentElement;
  const kept = (write) => {
    try {
      if (write !== undefined) localStorage.setItem("hwgrpo-theme", write);
      return localStorage.getItem("hwgrpo-theme");
    } catch {
      return null; // a browser may forbid a local file to keep anything: the choice then lasts as long as the page
    }
  };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : dark.matches);
  const button = h("button", { type: "button", class: "theme", onclick: () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    kept(root.dataset.theme);
    label();
  } });
  const label = () => { button.textContent = isDark() ? "☀ Light" : "☾ Dark"; };
  if (["light", "dark"].includes(kept())) root.dataset.theme = kept();
  dark.addEventListener("change", label);
  label();
  return button;
}

const panels = {
  curves: ["Curves", () => overview(run, view, (step) => { show("groups"); browser.showStep(step); })],
  groups: [["Groups ", h("span", { class: "muted" }, run.completions.groups.toLocaleString("en-US"))], () => browser.element],
  settings: ["Configuration", () => settingsPanel(run)],
};
const tabs = {};
const bodies = {};

function show(name) {
  for (const key of Object.keys(panels)) {
    const chosen = key === name;
    tabs[key].setAttribute("aria-selected", String(chosen));
    tabs[key].tabIndex = chosen ? 0 : -1;
    bodies[key].hidden = !chosen;
  }
  if (bodies[name].childNodes.length === 0) bodies[name].append(panels[name][1]());
  if (name === "groups") browser.load();
  history.replaceState(null, "", `#${name}`);
}

function tabKeys(event) {
  const names = Object.keys(panels);
  const now = names.findIndex((name) => tabs[name] === event.target);
  const next = { ArrowRight: now + 1, ArrowLeft: now - 1 }[event.key];
  if (next === undefined) return;
  const name = names[(next + names.length) % names.length];
  show(name);
  tabs[name].focus();
}

const [statusText, usualMood] = STATUS[run.status] ?? [run.status, "warn"];
// that a run came to its end is no good news where it did harm
const mood = run.status === "completed" && run.verdict.mood !== "good" ? "muted" : usualMood;
for (const [name, [label]] of Object.entries(panels)) {
  tabs[name] = h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": `panel-${name}`, onclick: () => show(name), onkeydown: tabKeys }, label);
  bodies[name] = h("div", { role: "tabpanel", id: `panel-${name}`, "aria-labelledby": `tab-${name}`, hidden: true });
}
const about = [run.settings.find(([key]) => key === "model.path")?.[1], run.environment.backend, run.environment.device].filter(Boolean).join(" · ");
document.getElementById("top").append(
  h("div", { class: "title" }, h("h1", {}, run.name), h("span", { class: `badge ${mood}` }, statusText), h("span", { class: "muted about" }, about), themeButton()),
  h("div", { class: "tabs", role: "tablist" }, Object.values(tabs)));
document.getElementById("main").append(...Object.values(bodies));
let printed = []; // bodies that are shown for the printer alone
window.addEventListener("beforeprint", () => {
  const shown = Object.keys(panels).find((name) => !bodies[name].hidden);
  printed = shown === "curves" ? ["settings"] : []; // the curves' tab is the report; the others are printed as they are
  for (const name of printed) {
    if (bodies[name].childNodes.length === 0) bodies[name].append(panels[name][1]());
    bodies[name].hidden = false;
  }
  view.charts.forEach((chart) => chart.setVisible(true)); // those below the fold are not drawn yet
});
window.addEventListener("afterprint", () => printed.forEach((name) => { bodies[name].hidden = true; }));
show(location.hash.slice(1) in panels ? location.hash.slice(1) : "curves");
