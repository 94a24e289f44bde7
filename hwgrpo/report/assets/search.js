// The completions as columns, and the groups that a filter leaves.

class Groups {
  constructor(raw) {
    Object.assign(this, raw);
    this.count = raw.groups.uid.length;
    const { reward, length } = raw.rows;
    this.mean = [];
    this.spread = [];
    this.length = [];
    for (let g = 0; g < this.count; g++) {
      let [known, sum, squares, tokens] = [0, 0, 0, 0];
      for (let r = this.start(g); r < this.end(g); r++) {
        tokens += length[r] ?? 0;
        if (reward[r] === null) continue;
        known += 1;
        sum += reward[r];
        squares += reward[r] ** 2;
      }
      this.mean.push(known > 0 ? sum / known : null);
      this.spread.push(known > 0 ? Math.sqrt(Math.max(0, squares / known - (sum / known) ** 2)) : null);
      this.length.push(tokens / Math.max(1, this.end(g) - this.start(g)));
    }
    const rewards = reward.filter((value) => value !== null);
    this.outcomes = Object.values(raw.rows.outcomes);
    this.words = raw.rows.response.map((text, r) => (r in raw.rows.outcomes ? `${text}\n${trajectoryText(raw.rows.outcomes[r])}` : text));
    this.low = rewards.reduce((a, b) => Math.min(a, b), Infinity);
    this.high = rewards.reduce((a, b) => Math.max(a, b), -Infinity);
  }

  start(group) {
    return this.groups.start[group];
  }

  end(group) {
    return this.groups.start[group + 1];
  }

  text(column, group) {
    const index = this.groups[column][group];
    return index === null ? null : this.texts[index];
  }

  /**
   * Groups with at least one completion that meets every wish, in the wished order, and which completions those are.
   * wishes: stepFrom, stepTo, rewardFrom, rewardTo (null: no limit), finished (null | 1 | 0), stop (null | why it ended),
   * pattern (RegExp | null), order
   */
  find(wishes) {
    const { reward, finished, outcomes } = this.rows;
    const hits = new Uint8Array(reward.length);
    const found = [];
    let completions = 0;
    const told = wishes.pattern === null ? null : this.texts.map((text) => wishes.pattern.test(text));
    const inRange = (value) => (wishes.rewardFrom === null && wishes.rewardTo === null)
      || (value !== null && value >= (wishes.rewardFrom ?? -Infinity) && value <= (wishes.rewardTo ?? Infinity));
    for (let g = 0; g < this.count; g++) {
      const step = this.groups.step[g];
      if (step < (wishes.stepFrom ?? -Infinity) || step > (wishes.stepTo ?? Infinity)) continue;
      const about = told === null || told[this.groups.prompt[g]] || wishes.pattern.test(this.groups.uid[g])
        || (this.groups.truth[g] !== null && told[this.groups.truth[g]]);
      let any = false;
      for (let r = this.start(g); r < this.end(g); r++) {
        if (wishes.finished !== null && finished[r] !== wishes.finished) continue;
        if (wishes.stop !== null && outcomes[r]?.stop !== wishes.stop) continue;
        if (!inRange(reward[r])) continue;
        if (!about && !wishes.pattern.test(this.words[r])) continue;
        hits[r] = 1;
        completions += 1;
        any = true;
      }
      if (any) found.push(g);
    }
    const by = (key, sign) => (a, b) => sign * ((key[a] ?? -Infinity) - (key[b] ?? -Infinity)) || a - b;
    const orders = { latest: by(this.groups.step, -1), best: by(this.mean, -1), worst: by(this.mean, 1), spread: by(this.spread, -1), longest: by(this.length, -1) };
    if (wishes.order in orders) found.sort(orders[wishes.order]);
    return { found, hits, completions };
  }
}

/** A pattern that finds the words as they stand, whatever their case; null for none. Without `g`: test() keeps no state. */
function patternOf(words) {
  return words === "" ? null : new RegExp(escapePattern(words), "iu");
}

function escapePattern(words) {
  return words.replace(/[\\^$.*+?()[\]{}|/-]/g, (sign) => (sign === "-" ? "\\x2d" : `\\${sign}`));
}

/** Text nodes and <mark> elements: the text with every hit marked. */
function marked(text, words) {
  if (words === "") return [text];
  const parts = text.split(new RegExp(`(${escapePattern(words)})`, "giu"));
  return parts.map((part, i) => (i % 2 === 1 ? h("mark", {}, part) : part));
}
