function table(head, rows, textColumns) {
  const body = el("tbody");
  for (const row of rows) {
    const line = el("tr", row.critical ? { class: "critical" } : {});
    row.cells.forEach((cell, i) => line.append(el("td", { text: cell, ...(textColumns.includes(i) ? { class: "text" } : {}) })));
    body.append(line);
  }
  return el("table", {}, el("thead", {}, el("tr", {}, ...head.map((name) => el("th", { text: name })))), body);
}
/* Spaces and line ends of a token on its own. */
function visible(text) {
  return text.replaceAll("\n", "\u23ce").replaceAll("\t", "\u21e5").replaceAll(" ", "\u2423") || "\u2205";
}
function maskedTable(view) {
  if (!view.masked.length) return el("p", { class: "hint", text: "No token of this step was masked." });
  const percent = (value) => `${(100 * value).toFixed(0)} %`;
  const rows = view.masked.map((m) => ({ critical: m.critical, cells: [
    visible(m.text), m.sign > 0 ? "A > 0" : "A < 0", m.count, m.of, percent(m.share), m.pi.toFixed(3), m.mu.toFixed(3),
    m.gap === null ? "-" : (m.gap > 0 ? "+" : "") + m.gap.toFixed(2)] }));
  const box = el("div", {}, table(["token", "advantage", "masked", "of", "share", "pi", "mu", "reward gap"], rows, [0]));
  if (view.masked.some((m) => m.critical)) box.append(el("p", { class: "hint", text: "A bar on the left marks a reward-critical token: responses with it have a clearly different reward from responses without it." }));
  return box;
}
function tokenText(response, i, vocabulary) {
  const pi = response.pi[i] / 1e4, mu = response.mu[i] / 1e4, flag = response.flags[i];
  const state = flag === "0" ? "not trained on" : flag === "3" ? "masked" : "kept";
  const ratio = mu > 0 ? (pi / mu).toFixed(3) : "-";
  const run = flag === "0" ? undefined : response.ages.filter(([start]) => start <= i).pop(), age = run ? `${ageText([run])}   ` : "";
  return `${visible(vocabulary[response.ids[i]])}   pi ${pi.toFixed(4)}   mu ${mu.toFixed(4)}   pi - mu ${(pi - mu).toFixed(4)}   ratio ${ratio}   A ${short(response.advantage)}   ${age}${state}`;
}
/* Ages of trained tokens in updates, as one number or a range. */
function ageText(ages) {
  const numbers = ages.map(([, age]) => age), least = Math.min(...numbers), most = Math.max(...numbers);
  if (!numbers.length) return "age unknown";
  return `age ${least === most ? least : `${least} to ${most}`}`;
}
function turnBox(response, index) {
  const [start, sampled, segment] = response.turns[index], next = response.turns[index + 1];
  const flags = response.flags.slice(start, next ? next[0] : undefined), untrained = flags.split("0").length - 1;
  const words = [sampled ? "policy" : "program, tools and template", `${flags.length} tokens`];
  if (response.segments > 1) words.unshift(`segment ${segment + 1} of ${response.segments}`);
  const end = next ? next[0] : response.flags.length;
  for (const [last, seconds, tools] of response.toolTimes)
    if (sampled && start <= last && last < end) words.push(`then ${short(seconds)} s in ${tools}`);
  if (sampled && untrained) words.push(`${untrained} not trained on`);
  return el("div", { class: sampled ? "turn policy" : "turn" }, el("div", { class: "head", text: words.join("  \u00b7  ") }));
}
function responseBox(response, vocabulary, showToken) {
  const words = [`sample ${response.sample}`, response.promptId, `reward ${short(response.reward)}${response.failed ? " (failed)" : ""}`,
    `advantage ${short(response.advantage)}`, `${response.masked} masked`, `finish ${response.finish}`, ageText(response.ages)];
  for (const [name, value] of response.parts) words.push(`${name} ${short(value)}`);
  if (response.segments > 1) words.push(`${response.segments} segments`);
  if (response.update !== null) words.push(`update ${response.update + 1} of the step`);
  const tokens = el("div", { class: "tokens" });
  if (response.cut[0]) tokens.append(`\u2026 ${response.cut[0]} tokens \u2026 `);
  /* An episode is shown as a conversation: each turn in a box of its own. */
  const turnAt = new Map(response.turns.map((turn, index) => [turn[0], index]));
  let box = tokens;
  response.ids.forEach((id, i) => {
    if (turnAt.has(i)) {
      box = turnBox(response, turnAt.get(i));
      tokens.append(box);
    }
    const moved = (response.pi[i] - response.mu[i]) / 1e4, flag = response.flags[i];
    const node = el("span", { text: vocabulary[id] });
    if (flag === "0") node.className = "given";
    else {
      if (flag === "3") node.className = "masked";
      const strength = Math.min(0.85, Math.abs(moved) * 2.5);
      if (strength > 0.02) node.style.backgroundColor = `rgba(var(--${moved > 0 ? "up" : "down"}), ${strength.toFixed(2)})`;
    }
    node.title = tokenText(response, i, vocabulary);
    node.addEventListener("click", () => showToken(node, node.title));
    box.append(node);
  });
  if (response.cut[1]) tokens.append(` \u2026 ${response.cut[1]} tokens`);
  const label = response.label ? `   [label: ${response.label}]` : "";
  return el("article", { class: "response" }, el("div", { class: "head", text: words.join("  \u00b7  ") }),
    ...(response.failure ? [el("div", { class: "failure", text: response.failure })] : []),
    el("div", { class: "prompt", text: response.prompt + label }), tokens);
}
