const byId = (name) => document.getElementById(name);
const data = JSON.parse(byId("data").textContent);
const state = { run: data.runs.findIndex((run) => run.recorded.length), step: null };
const marks = [];
function about() {
  const parts = data.runs.map((run) => `${run.name}: ${run.loss}, step ${run.last}${run.planned ? " of " + run.planned : ""}${run.finished ? "" : " (not finished)"}`);
  byId("about").textContent = parts.join("  \u00b7  ");
}
function showFindings() {
  const section = byId("findings");
  for (const run of data.runs) {
    const list = el("ul");
    for (const finding of run.findings) {
      const item = el("li", { class: finding.level }, finding.text);
      if (finding.suggestion) item.append(el("span", { class: "suggestion", text: finding.suggestion }));
      list.append(item);
    }
    if (data.runs.length === 1) { section.append(list); continue; }
    const box = el("details", {}, el("summary", { text: `${run.name}: ${run.findings.length} findings` }), list);
    box.open = data.runs.length === 2;
    section.append(box);
  }
}
function lastOf(run, metric) {
  for (const one of run.charts) for (const line of one.lines) if (line.metric === metric) return line.points[line.points.length - 1][1];
  return null;
}
function showComparison() {
  if (data.runs.length < 2) return;
  const section = byId("compare"), names = data.runs.map((run) => run.name);
  section.hidden = false;
  const metrics = data.runs[0].charts.flatMap((one) => one.lines.map((line) => [`${one.title}, ${line.label}`, one.unit, line.metric]));
  const last = metrics.map(([title, unit, metric]) => ({ cells: [unit ? `${title} (${unit})` : title, ...data.runs.map((run) => short(lastOf(run, metric)))] }));
  const box = section.querySelector("div");
  box.append(el("h3", { text: "Settings that differ" }), data.differences.length
    ? table(["key", ...names], data.differences.map((cells) => ({ cells })), [0]) : el("p", { class: "hint", text: "Only the output folder." }));
  const details = el("details", {}, el("summary", { text: "Last values" }), table(["metric", ...names], last, []));
  box.append(details);
}
/* More than two runs: a chart a metric, with one color a run. First the first line of each chart, then the others. */
function drawMetrics(key, grid) {
  const metrics = new Map();
  data.runs.forEach((run, index) => [...run.charts, ...run.others].forEach((one) => one.lines.forEach((line, position) => {
    const isFirst = run.charts.includes(one) && position === 0 && !line.metric.startsWith("train/counterfactual/");
    if (isFirst !== (key === "charts")) return;
    const title = line.label && one.lines.length > 1 ? `${one.title}: ${line.label}` : one.title;
    if (!metrics.has(line.metric)) metrics.set(line.metric, { title, unit: one.unit, lines: [] });
    metrics.get(line.metric).lines.push({ ...line, label: run.name, color: index });
  })));
  for (const { title, unit, lines } of metrics.values()) {
    const made = chart(title, unit, lines, pickNearest);
    marks.push(made.mark);
    if (state.step !== null) made.mark(state.step);
    grid.append(made.card);
  }
}
/* The charts of all runs under one key, into a grid. */
function drawCharts(key, grid) {
  if (data.runs.length > 2) { drawMetrics(key, grid); return; }
  const titles = [...new Set(data.runs.flatMap((run) => run[key].map((one) => one.title)))];
  for (const title of titles) {
    const labels = [], lines = [];
    let unit = "";
    data.runs.forEach((run, place) => {
      const one = run[key].find((each) => each.title === title);
      if (!one) return;
      unit = one.unit;
      for (const line of one.lines) {
        if (!labels.includes(line.label)) labels.push(line.label);
        const label = data.runs.length > 1 ? `${line.label} (${place + 1})` : line.label;
        lines.push({ ...line, label, color: labels.indexOf(line.label), second: place > 0 });
      }
    });
    const made = chart(title, unit, lines, pickNearest);
    marks.push(made.mark);
    if (state.step !== null) made.mark(state.step);
    grid.append(made.card);
  }
}
function showCurves() {
  drawCharts("charts", byId("curves").querySelector(".grid"));
  byId("others").addEventListener("toggle", () => {
    const grid = byId("others").querySelector(".grid");
    if (!grid.childElementCount) drawCharts("others", grid);
  });
}
function pickNearest(step) {
  if (state.run < 0) return;
  const steps = data.runs[state.run].recorded;
  choose(steps.reduce((a, b) => Math.abs(b - step) < Math.abs(a - step) ? b : a));
  byId("step").scrollIntoView({ block: "start" });
}
function showToken(node, text) {
  for (const old of document.querySelectorAll(".pick")) old.classList.remove("pick");
  node.classList.add("pick");
  byId("token").textContent = text;
}
function choose(step) {
  const run = data.runs[state.run], view = JSON.parse(byId(`step-${state.run}-${step}`).textContent);
  state.step = step;
  byId("slider").max = run.recorded.length - 1;
  byId("slider").value = run.recorded.indexOf(step);
  byId("which").textContent = `step ${step}: ${view.samples} samples, ${view.tokens} tokens, ${view.maskedTokens} masked`;
  byId("masked").replaceChildren(maskedTable(view));
  const boxes = view.responses.map((response) => responseBox(response, view.vocabulary, showToken));
  byId("responses").replaceChildren(...boxes);
  byId("token").textContent = "";
  byId("scatter").replaceChildren(scatter(view.points, (point) => {
    const box = boxes[point[3]], place = point[4] - view.responses[point[3]].first;
    const token = box.querySelectorAll(".tokens span")[place];
    box.scrollIntoView({ block: "center" });
    if (token) showToken(token, token.title);
  }));
  marks.forEach((mark) => mark(step));
  history.replaceState(null, "", `#${state.run}-${step}`);
}
function openSteps() {
  if (state.run < 0) return;
  byId("step").hidden = false;
  data.runs.forEach((run, place) => { if (run.recorded.length) byId("run").append(el("option", { value: place, text: run.name })); });
  byId("run").hidden = data.runs.length < 2;
  const move = (by) => {
    const steps = data.runs[state.run].recorded, place = steps.indexOf(state.step) + by;
    if (steps[place] !== undefined) choose(steps[place]);
  };
  byId("before").addEventListener("click", () => move(-1));
  byId("after").addEventListener("click", () => move(1));
  byId("slider").addEventListener("input", (event) => choose(data.runs[state.run].recorded[+event.target.value]));
  byId("run").addEventListener("change", (event) => { state.run = +event.target.value; pickNearest(state.step); });
  const requested = /^#(\d+)-(\d+)$/.exec(location.hash);
  if (requested && data.runs[requested[1]] && data.runs[requested[1]].recorded.includes(+requested[2])) { state.run = +requested[1]; byId("run").value = state.run; choose(+requested[2]); return; }
  const steps = data.runs[state.run].recorded;
  choose(steps[steps.length - 1]);
}
/* Counts of all recorded steps: kinds of tokens, ages, the share of the gradient, and other losses on the same tokens. */
function showMasks() {
  const percent = (part, whole) => whole ? `${(100 * part / whole).toFixed(2)} %` : "-";
  const box = byId("masks").querySelector("div");
  for (const run of data.runs) {
    const masks = run.masks;
    if (!masks) continue;
    byId("masks").hidden = false;
    if (data.runs.length > 1) box.append(el("h3", { text: run.name }));
    const removed = masks.gradient === null ? "" : `, ${(100 * masks.gradient).toFixed(2)} % of the gradient (sum of |A| min(r, C))`;
    box.append(el("p", { class: "hint", text: `${masks.masked} of ${masks.tokens} tokens with an advantage were masked${removed}.` }));
    const kinds = masks.kinds.map(([kind, up, ofUp, down, ofDown]) => ({ cells: [kind, `${up} of ${ofUp}`, percent(up, ofUp), `${down} of ${ofDown}`, percent(down, ofDown)] }));
    box.append(el("div", { class: "scroll" }, table(["kind", "A > 0", "share", "A < 0", "share"], kinds, [0])));
    const ages = masks.ages.map(([age, part, whole]) => ({ cells: [age ?? "not recorded", `${part} of ${whole}`, percent(part, whole)] }));
    box.append(el("div", { class: "scroll" }, table(["age of the token in updates", "masked", "share"], ages, [])));
    if (masks.ages.some(([age]) => age === null)) box.append(el("p", { class: "hint", text: "Age not recorded: files of earlier versions lack the column trained_policy_version." }));
    if (!masks.others.length) continue;
    const others = masks.others.map(([name, all, both]) => ({ cells: [name, percent(all, masks.tokens), percent(both, all)] }));
    box.append(el("div", { class: "scroll" }, table(["other loss, its defaults", "would have masked", "of these masked here"], others, [0])));
  }
}
/* Shares of episodes and sampled tokens over the run, and the failures of recorded steps by their first error. */
function showAgents() {
  const box = byId("agents").querySelector("div");
  for (const run of data.runs) {
    const agents = run.agents;
    if (!agents) continue;
    byId("agents").hidden = false;
    if (data.runs.length > 1) box.append(el("h3", { text: run.name }));
    const rows = agents.metrics.map(([title, first, last, mean]) => ({ cells: [title, short(first), short(last), short(mean)] }));
    box.append(el("div", { class: "scroll" }, table(["", "first step", "last step", "mean"], rows, [0])));
    if (!agents.failures.length) continue;
    const failures = agents.failures.map(([count, error, where]) => ({ cells: [count, error, where] }));
    box.append(el("div", { class: "scroll" }, table(["failed", "first line of the error, recorded steps", "first in"], failures, [1, 2])));
  }
}
function showLedger() {
  if (!data.ledger) return;
  const section = byId("ledger"), ledger = data.ledger;
  section.hidden = false;
  const rows = ledger.rows.map(([cause, part, share]) => ({ cells: [cause, short(part), share === null ? "-" : `${(100 * share).toFixed(1)} %`] }));
  section.querySelector("div").append(el("p", { class: "hint", text: `Mean |log pi - log mu| of ${ledger.tokens} tokens: ${short(ledger.mean)}` }),
    table(["cause", "part", "share"], rows, []),
    ...ledger.absent.map(([cause, why]) => el("p", { class: "hint", text: `${cause}: ${why}` })));
}
about(); showFindings(); showComparison(); showCurves(); showAgents(); showMasks(); openSteps(); showLedger();
document.documentElement.dataset.ready = "yes";
if (data.refresh) setTimeout(() => location.reload(), 1000 * data.refresh);
