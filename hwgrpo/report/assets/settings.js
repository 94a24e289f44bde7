// Configuration, environment and kernels as tables.

function table(headings, rows) {
  return h("div", { class: "scroll", tabindex: 0 }, h("table", {}, h("thead", {}, h("tr", {}, headings.map((text) => h("th", { scope: "col" }, text)))), h("tbody", {}, rows)));
}

/** A dotted name that may be broken after its dots and underscores. */
function breakable(name) {
  return name.split(/(?<=[._])/).flatMap((part) => [part, h("wbr")]);
}

function settingsPanel(run) {
  const panel = h("div", { class: "settings" });
  panel.append(configuration(run.settings), h("div", { class: "columns" }, environment(run), kernels(run.kernels)));
  return panel;
}

function configuration(settings) {
  if (settings.length === 0) return h("p", { class: "notice" }, "No config.yaml could be read.");
  const differs = ([, value, standard]) => value !== standard;
  const body = h("div", {});
  const count = h("span", { class: "muted", role: "status" });
  const words = h("input", { type: "search", placeholder: "Search settings", "aria-label": "search settings", oninput: () => show() });
  const only = h("input", { type: "checkbox", id: "changed", checked: settings.some(differs), onchange: () => show() });
  const show = () => {
    const wanted = words.value.trim().toLowerCase();
    const found = settings.filter((row) => (!only.checked || differs(row)) && row.join(" ").toLowerCase().includes(wanted));
    count.textContent = `${found.length} of ${plural(settings.length, "setting")}`;
    body.replaceChildren(table(["Setting", "Value", "Default"], found.map(([key, value, standard, meaning]) => h("tr", { class: differs([key, value, standard]) ? "differs" : null },
      h("td", { title: meaning }, h("code", {}, breakable(key))), h("td", {}, h("code", {}, value)), h("td", { class: "muted" }, standard === null ? "unknown setting" : h("code", {}, standard))))));
  };
  show();
  return h("section", { class: "card" }, h("h3", {}, "Configuration"),
    h("div", { class: "bar" }, words, h("label", { class: "check", for: "changed" }, only, "Only what differs from the defaults"), count), body);
}

/** [dotted name, text] of every single value of a record; an empty one shows as none. */
function flattened(value, name) {
  if (value === null || typeof value !== "object") return [[name, String(value ?? NONE)]];
  const inner = Object.entries(value);
  if (inner.length === 0) return [[name, NONE]];
  return inner.flatMap(([key, each]) => flattened(each, `${name}.${key}`));
}

function environment(run) {
  const rows = Object.entries(run.environment).flatMap(([name, value]) => flattened(value, name));
  const { summary } = run;
  const facts = [["folder", run.folder], ["report written", run.written]];
  if (summary.resumed_from) facts.push(["resumed from step", String(summary.resumed_from)]);
  if (summary.tokens) facts.push(["tokens", `${Math.round(summary.tokens).toLocaleString("en-US")} (prompts and responses)`]);
  Object.entries(summary.paths ?? {}).forEach(([what, path]) => facts.push([what, path]));
  const line = ([name, value]) => h("tr", {}, h("td", {}, breakable(name)), h("td", {}, h("code", {}, value)));
  return h("section", { class: "card" }, h("h3", {}, "Environment"),
    rows.length === 0 ? h("p", { class: "muted" }, "No environment.json could be read.") : table(["Name", "Value"], rows.map(line)),
    h("h3", {}, "Run"), table(["Name", "Value"], facts.map(line)));
}

function kernels(record) {
  const choices = record.choices ?? [];
  if (choices.length === 0) return h("section", { class: "card" }, h("h3", {}, "Kernels"), h("p", { class: "muted" }, "Not recorded yet: kernels.json is written after the first step."));
  const rows = choices.map((choice) => {
    const skipped = Object.entries(choice.skipped ?? {}).map(([name, reason]) => `${name}: ${reason}`).join("; ");
    return h("tr", {}, h("td", {}, h("code", {}, breakable(choice.op))), h("td", {}, h("b", {}, choice.implementation), choice.pinned_by ? ` (pinned by ${choice.pinned_by})` : ""),
      h("td", {}, `${choice.device_type} ${choice.dtype}`), h("td", {}, String(choice.shape_class)), h("td", { class: "muted" }, skipped || NONE));
  });
  return h("section", { class: "card" }, h("h3", {}, "Kernels"), table(["Operation", "Implementation", "Runs on", "Size class", "Skipped, and why"], rows));
}
