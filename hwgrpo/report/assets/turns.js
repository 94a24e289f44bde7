// Trajectories as turns: who said what, which tools were called how, and the reward of each turn.

const FOLDED_LINES = 8; // an observation of more lines, or of more characters, opens by a click
const FOLDED_CHARACTERS = 800;
const ROLES = { assistant: "policy" };
const STOPS = {
  done: ["good", "the environment, or a turn without a tool call, ended it"],
  max_turns: ["warn", "rollout.agent.max_turns"],
  length: ["warn", "no tokens were left: rollout.max_response_tokens"],
  failed: ["bad", "the environment failed"],
};

function stopBadge(outcome) {
  const [mood, title] = STOPS[outcome.stop] ?? ["warn", ""];
  return outcome.stop === "" ? null : h("span", { class: `badge ${mood} stop`, title }, outcome.stop);
}

/** " · 3 turns · 2 calls (1 failed) · Guess" */
function aboutTrajectory(outcome) {
  const policy = outcome.turns.filter((turn) => turn.role === "assistant").length || 1;
  const calls = outcome.calls === 0 ? [] : [plural(outcome.calls, "call") + (outcome.failed ? ` (${outcome.failed} failed)` : "")];
  return ["", plural(policy, "turn"), ...calls, outcome.environment].filter((part, i) => i === 0 || part).join(" · ");
}

/** All text of a trajectory, for the search. */
function trajectoryText(outcome) {
  const said = outcome.turns.flatMap((turn) => [turn.name, turn.reasoning, turn.text, ...(turn.calls ?? []).map(callText)]);
  return [outcome.environment, outcome.failure, ...said].filter(Boolean).join("\n");
}

/** `name(key="value", ...)` on one line; each argument on lines of its own where that is long, texts as they stand. */
function callText([name, given]) {
  if (given === null || typeof given !== "object" || Array.isArray(given)) return `${name}(${given === null || given === undefined ? "" : JSON.stringify(given)})`;
  const line = `${name}(${Object.entries(given).map(([key, value]) => `${key}=${JSON.stringify(value)}`).join(", ")})`;
  const isText = Object.values(given).some((value) => typeof value === "string" && value.includes("\n"));
  if (line.length <= 100 && !isText) return line;
  const parts = Object.entries(given).map(([key, value]) => (typeof value === "string" && value.includes("\n")
    ? `  ${key}=\n${value.replace(/^/gm, "    ")}` : `  ${key}=${JSON.stringify(value)}`));
  return [`${name}(`, ...parts, ")"].join("\n");
}

function turnOf(turn, words, images) {
  const kind = turn.role === "assistant" ? "policy" : turn.role === "tool" ? "tool" : turn.role === "system" ? "system" : "user";
  const text = (value) => h("pre", { class: "text", tabindex: 0 }, marked(value, words));
  const parts = [];
  if (turn.reasoning) parts.push(h("details", { class: "reasoning" }, h("summary", {}, "Reasoning"), text(turn.reasoning)));
  if (turn.images) parts.push(picturesOf(turn.images, images));
  if (turn.text !== "" || !(turn.calls || turn.images)) parts.push(turn.text === "" ? h("pre", { class: "text muted" }, "(empty)") : kind === "policy" ? text(turn.text) : folded(turn.text, text));
  for (const call of turn.calls ?? []) parts.push(h("pre", { class: "text call", tabindex: 0 }, marked(callText(call), words)));
  const { reward } = turn;
  const sign = reward > 0 ? "above" : reward < 0 ? "below" : "even";
  return h("li", { class: `turn ${kind}` },
    h("div", { class: "who" }, h("b", {}, ROLES[turn.role] ?? turn.role), turn.name ? h("code", {}, marked(turn.name, words)) : null,
      reward === null || reward === undefined ? null : h("span", { class: `reward ${sign}` }, `reward ${formatSigned(reward)}`)),
    parts);
}

/** A long observation shows its first lines, and all of it after a click. */
function folded(value, text) {
  const lines = value.split("\n");
  if (lines.length <= FOLDED_LINES && value.length <= FOLDED_CHARACTERS) return text(value);
  const first = lines.slice(0, 3).join("\n").slice(0, 300);
  return h("details", { class: "long" }, h("summary", {}, h("span", { class: "first" }, first), h("span", { class: "more" }, "… ", h("u", {}, lengthOf(lines.length, value.length)))),
    text(value));
}

function lengthOf(lines, characters) {
  return lines > 1 ? `all ${plural(lines, "line")}` : `all ${plural(characters, "character")}`;
}
