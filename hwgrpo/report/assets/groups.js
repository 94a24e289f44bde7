// The groups browser: filters, a list that makes only the rows in sight, and one group with its completions.

const ROW = 64; // pixels, as the style sheet has it

class GroupBrowser {
  constructor(run) {
    this.run = run;
    this.data = null;
    this.selected = null;
    this.listed = { found: [], hits: new Uint8Array(0), completions: 0 };
    this.controls = this.makeControls();
    this.count = h("span", { class: "muted", role: "status" });
    this.rows = h("div", { class: "rows" });
    this.list = h("div", { class: "list", tabindex: 0, role: "listbox", "aria-label": "groups", onscroll: () => this.drawRows(),
      onkeydown: (event) => this.keyDown(event) }, this.rows);
    this.detail = h("section", { class: "detail", "aria-label": "the chosen group" });
    this.browser = h("div", { class: "browser" }, this.list, this.detail);
    const { total, kept } = run.completions;
    const left = total > kept ? h("p", { class: "notice" }, `This page holds ${plural(kept, "completion")} of ${total.toLocaleString("en-US")}: `
      + "whole steps, spread over the run. hwgrpo report --completions N takes more.") : null;
    const images = run.completions.images_left;
    const unseen = images > 0 ? h("p", { class: "notice" }, `${plural(images, "further image")} would make this page too large: hwgrpo report --image-mb N takes more.`) : null;
    this.element = h("div", { class: "groups" }, this.controls.form, this.count, left, unseen, this.browser);
    new ResizeObserver(() => this.drawRows()).observe(this.list);
  }

  /** Parse the completions; done when the browser is first looked at, or when the page has nothing else to do. */
  load() {
    if (this.data !== null) return;
    this.data = new Groups(readData("completions-data"));
    if (this.data.count === 0) {
      this.element.replaceChildren(h("p", { class: "notice" }, this.run.completions.total > 0 ? "This page was written without completions."
        : "No completions were logged: observe.completions_per_step=0, or no step is done yet."));
      return;
    }
    const { data } = this;
    const { step } = data.groups;
    const bounds = [step.reduce((a, b) => Math.min(a, b)), step.reduce((a, b) => Math.max(a, b)), formatNumber(data.low), formatNumber(data.high)];
    ["stepFrom", "stepTo", "rewardFrom", "rewardTo"].forEach((name, i) => {
      this.controls[name].placeholder = Number.isFinite(bounds[i]) || i > 1 ? String(bounds[i]) : "";
    });
    const stops = [...new Set(data.outcomes.map((outcome) => outcome.stop))].filter(Boolean).sort();
    this.controls.stop.append(...stops.map((stop) => h("option", { value: stop }, stop)));
    this.controls.stop.hidden = stops.length === 0;
    this.refresh();
  }

  makeControls() {
    const refresh = debounce(100, () => this.refresh());
    const number = (label) => h("input", { type: "number", step: "any", "aria-label": label, oninput: refresh });
    const choice = (label, ...options) => h("select", { "aria-label": label, onchange: refresh },
      options.map(([value, text]) => h("option", { value }, text)));
    const controls = {
      words: h("input", { type: "search", placeholder: "Search prompts and responses", "aria-label": "search prompts and responses", oninput: refresh }),
      stepFrom: number("lowest step"), stepTo: number("highest step"),
      rewardFrom: number("lowest reward"), rewardTo: number("highest reward"),
      finished: choice("finished or truncated", ["", "Finished or not"], ["1", "Finished"], ["0", "Truncated"]),
      stop: choice("why the trajectory ended", ["", "Any end"]),
      order: choice("order of the groups", ["step", "First steps first"], ["latest", "Last steps first"], ["best", "Highest reward"],
        ["worst", "Lowest reward"], ["spread", "Widest spread"], ["longest", "Longest"]),
    };
    controls.form = h("form", { class: "bar filters", onsubmit: (event) => event.preventDefault(), onreset: () => setTimeout(() => this.refresh()) },
      controls.words, h("span", { class: "range" }, "Step", controls.stepFrom, "to", controls.stepTo),
      h("span", { class: "range" }, "Reward", controls.rewardFrom, "to", controls.rewardTo),
      controls.finished, controls.stop, controls.order, h("button", { type: "reset" }, "Clear"));
    return controls;
  }

  showStep(step) {
    this.load();
    if (this.data.count === 0) return;
    this.controls.form.reset();
    this.controls.stepFrom.value = this.controls.stepTo.value = step;
    this.refresh();
  }

  refresh() {
    if (this.data === null || this.data.count === 0) return;
    const { controls } = this;
    const number = (input) => (input.value === "" ? null : Number(input.value));
    this.words = controls.words.value.trim();
    this.listed = this.data.find({
      stepFrom: number(controls.stepFrom), stepTo: number(controls.stepTo), rewardFrom: number(controls.rewardFrom), rewardTo: number(controls.rewardTo),
      finished: controls.finished.value === "" ? null : Number(controls.finished.value),
      stop: controls.stop.value === "" ? null : controls.stop.value, pattern: patternOf(this.words), order: controls.order.value,
    });
    const { found, completions } = this.listed;
    this.count.textContent = `${plural(found.length, "group")}, ${plural(completions, "completion")}`
      + (completions < this.data.rows.response.length ? ` of ${this.data.rows.response.length.toLocaleString("en-US")}` : "");
    this.rows.style.setProperty("height", `${found.length * ROW}px`);
    this.list.scrollTop = 0;
    this.select(found.includes(this.selected) ? this.selected : found[0] ?? null, false);
  }

  select(group, byHand) {
    this.selected = group;
    if (byHand) this.browser.classList.add("open");
    this.drawRows();
    this.drawDetail();
    if (byHand && this.list.clientHeight === 0) this.detail.scrollIntoView({ block: "start" }); // on a phone the group takes the list's place
  }

  drawRows() {
    const { found } = this.listed;
    if (this.list.clientHeight === 0) return;
    const first = Math.max(0, Math.floor(this.list.scrollTop / ROW) - 4);
    const last = Math.min(found.length, Math.ceil((this.list.scrollTop + this.list.clientHeight) / ROW) + 4);
    const made = [];
    for (let i = first; i < last; i++) made.push(this.makeRow(found[i], i));
    this.rows.replaceChildren(...made);
    if (this.selected === null) this.list.removeAttribute("aria-activedescendant");
    else this.list.setAttribute("aria-activedescendant", `group-${this.selected}`);
  }

  makeRow(group, place) {
    const { data } = this;
    const chosen = group === this.selected;
    const image = (data.groups.images[group] ?? []).map((index) => data.images[index]).find(([source]) => source !== null);
    return h("div", {
      class: `row${chosen ? " chosen" : ""}${image ? " pictured" : ""}`, role: "option", id: `group-${group}`, "aria-selected": String(chosen),
      "aria-posinset": place + 1, "aria-setsize": this.listed.found.length, style: { top: `${place * ROW}px` },
      onclick: () => this.select(group, true),
    }, image ? h("img", { src: image[0], alt: "" }) : null,
    h("div", { class: "line" }, h("span", { class: "muted" }, `step ${data.groups.step[group]}`), this.strip(group),
      h("b", {}, formatNumber(data.mean[group]))),
    h("div", { class: "line prompt" }, (data.text("question", group) ?? data.text("prompt", group)).trim().slice(0, 300) || "(empty prompt)"));
  }

  /** One small bar per completion, as high as its reward lies between the run's lowest and highest. */
  strip(group) {
    const { data } = this;
    const [first, last] = [data.start(group), Math.min(data.end(group), data.start(group) + 24)];
    const span = data.high - data.low || 1;
    const bars = [];
    for (let r = first; r < last; r++) {
      const reward = data.rows.reward[r];
      const high = reward === null ? 1 : 2 + 14 * ((reward - data.low) / span);
      bars.push(s("rect", { x: (r - first) * 5, y: 16 - high, width: 4, height: high, class: reward === null ? "none" : null }));
    }
    return s("svg", { class: "strip", width: 5 * (last - first), height: 16, "aria-hidden": "true" }, bars);
  }

  drawDetail() {
    const { data, selected: group } = this;
    this.detail.scrollTop = 0;
    if (group === null) {
      this.detail.replaceChildren(h("p", { class: "muted" }, "No group meets the filter."));
      return;
    }
    const truth = data.text("truth", group);
    const source = data.text("source", group);
    const rows = [];
    for (let r = data.start(group); r < data.end(group); r++) rows.push(r);
    const { hits } = this.listed;
    const ordered = [...rows.filter((r) => hits[r]), ...rows.filter((r) => !hits[r])]; // what was searched for comes first
    const back = h("button", { type: "button", class: "back", onclick: () => { this.browser.classList.remove("open"); this.drawRows(); this.list.focus(); } }, "← All groups");
    this.detail.replaceChildren(back,
      h("div", { class: "facts" }, fact("Step", String(data.groups.step[group])), fact("Mean reward", formatNumber(data.mean[group])),
        fact("Spread", formatNumber(data.spread[group])), fact("Mean length", formatTokens(data.length[group])), fact("Prompt id", data.groups.uid[group]),
        source ? fact("Source", source) : null),
      h("h3", {}, "Prompt"), ...(group in data.groups.images ? [picturesOf(data.groups.images[group], data.images)] : []), h("pre", { class: "text", tabindex: 0 }, marked(data.text("prompt", group), this.words)),
      ...(truth === null ? [] : [h("h3", {}, "Ground truth"), h("pre", { class: "text", tabindex: 0 }, marked(truth, this.words))]),
      h("h3", {}, plural(rows.length, "completion")),
      h("div", { class: rows.some((r) => data.rows.outcomes[r]?.turns.length) ? "cards wide" : "cards" }, ordered.map((r) => this.card(r, r - rows[0]))));
    this.showMarks();
  }

  /** Scroll each long text to the first words that were searched for. */
  showMarks() {
    for (const box of this.detail.querySelectorAll("pre.text")) {
      const first = box.querySelector("mark");
      if (first !== null) box.closest("details")?.setAttribute("open", "");
      if (first !== null) box.scrollTop = first.getBoundingClientRect().top - box.getBoundingClientRect().top - 40;
    }
  }

  card(row, place) {
    const { reward, advantage, length, finished, response, rewards, extras, outcomes, images } = this.data.rows;
    const outcome = outcomes[row];
    const sign = advantage[row] === null || Math.abs(advantage[row]) < 0.005 ? "even" : advantage[row] > 0 ? "above" : "below";
    const names = Object.keys(rewards);
    const hit = this.listed.hits[row] === 1;
    return h("article", { class: `card completion ${sign}${hit ? "" : " missed"}`, },
      h("header", {},
        h("span", { class: "pair" }, "reward ", h("b", {}, formatNumber(reward[row]))),
        h("span", { class: "pair advantage" }, "advantage ", h("b", {}, formatSigned(advantage[row]))),
        outcome ? stopBadge(outcome) : finished[row] ? null : h("span", { class: "badge warn" }, "truncated"),
        reward[row] === null ? h("span", { class: "badge bad" }, "taken out") : null,
        h("span", { class: "about muted" }, `#${place + 1} · ${plural(length[row] ?? 0, "token")}${outcome ? aboutTrajectory(outcome) : ""}${hit ? "" : " · does not meet the filter"}`)),
      outcome?.failure ? h("p", { class: "failure bad" }, marked(outcome.failure, this.words)) : null,
      outcome?.turns.length ? h("ol", { class: "turns" }, outcome.turns.map((turn) => turnOf(turn, this.words, this.data.images)))
        : h("pre", { class: "text", tabindex: 0 }, response[row] === "" ? h("span", { class: "muted" }, "(empty)") : marked(response[row], this.words)),
      picturesOf(images[row], this.data.images),
      names.length > 1 ? h("dl", { class: "parts" }, names.map((name) => [h("dt", {}, name), h("dd", {}, formatNumber(rewards[name][row]))]).flat()) : null,
      extras[row] ? h("details", {}, h("summary", {}, "Extras"), h("pre", { class: "text" }, JSON.stringify(extras[row], null, 1))) : null);
  }

  keyDown(event) {
    const { found } = this.listed;
    const now = found.indexOf(this.selected);
    const page = Math.max(1, Math.floor(this.list.clientHeight / ROW) - 1);
    const moves = { ArrowDown: now + 1, ArrowUp: now - 1, PageDown: now + page, PageUp: now - page, Home: 0, End: found.length - 1 };
    if (event.key === "Enter" && this.selected !== null) this.select(this.selected, true);
    else if (event.key in moves && found.length > 0) {
      const place = Math.min(found.length - 1, Math.max(0, moves[event.key]));
      const [top, bottom] = [place * ROW, (place + 1) * ROW - this.list.clientHeight];
      this.list.scrollTop = Math.min(top, Math.max(bottom, this.list.scrollTop));
      this.select(found[place], false);
    } else return;
    event.preventDefault();
  }
}

function fact(name, value) {
  return h("div", {}, h("span", { class: "muted" }, name), h("b", {}, value));
}
