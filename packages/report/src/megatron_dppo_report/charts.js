const NS = "http://www.w3.org/2000/svg";
function el(name, attributes, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) {
    if (key === "text") node.textContent = value; else node.setAttribute(key, value);
  }
  node.append(...children);
  return node;
}
function svg(name, attributes, text) {
  const node = document.createElementNS(NS, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}
function short(value) {
  if (value === null || value === undefined) return "-";
  const size = Math.abs(value);
  if (size >= 1e5) return value.toExponential(1);
  if (size !== 0 && size < 1e-3) return value.toExponential(1);
  return String(+value.toPrecision(4));
}
const W = 300, H = 130, LEFT = 46, RIGHT = 6, TOP = 8, BOTTOM = 18;
/* One chart: lines of one or more runs; pick(step) is called by a click. Returns the card and how to mark a step. */
function chart(title, unit, lines, pick) {
  const all = lines.flatMap((line) => line.points);
  let [x0, x1] = [Math.min(...all.map((p) => p[0])), Math.max(...all.map((p) => p[0]))];
  let [y0, y1] = [Math.min(...all.map((p) => p[1])), Math.max(...all.map((p) => p[1]))];
  if (y0 > 0 && y0 < y1 * 0.6) y0 = 0;
  if (y0 === y1) [y0, y1] = y0 === 0 ? [0, 1] : [y0 - Math.abs(y0) * 0.5, y1 + Math.abs(y1) * 0.5];
  if (x0 === x1) [x0, x1] = [x0 - 1, x1 + 1];
  const x = (v) => LEFT + (v - x0) / (x1 - x0) * (W - LEFT - RIGHT);
  const y = (v) => TOP + (1 - (v - y0) / (y1 - y0)) * (H - TOP - BOTTOM);
  const root = svg("svg", { viewBox: `0 0 ${W} ${H}`, role: "img", "aria-label": title });
  for (const v of [y0, (y0 + y1) / 2, y1]) {
    root.append(svg("line", { x1: LEFT, x2: W - RIGHT, y1: y(v), y2: y(v), class: "axis" }));
    root.append(svg("text", { x: LEFT - 4, y: y(v) + 3, "text-anchor": "end" }, short(+v.toPrecision(3))));
  }
  for (const [v, anchor] of [[x0, "start"], [x1, "end"]]) {
    root.append(svg("text", { x: x(v), y: H - 5, "text-anchor": anchor }, short(v)));
  }
  for (const line of lines) {
    const d = line.points.map((p, i) => `${i ? "L" : "M"}${x(p[0]).toFixed(1)} ${y(p[1]).toFixed(1)}`).join("");
    const path = svg("path", { d, stroke: `var(--c${line.color % 8})` });
    if (line.second) path.setAttribute("class", "second");
    root.append(path);
    if (line.points.length < 3) {
      for (const p of line.points) root.append(svg("circle", { cx: x(p[0]), cy: y(p[1]), r: 2.5, fill: `var(--c${line.color % 8})` }));
    }
  }
  const mark = svg("line", { y1: TOP, y2: H - BOTTOM, class: "chosen", visibility: "hidden" });
  root.append(mark);
  const keys = el("div", { class: "keys" });
  const values = lines.map((line) => {
    const sample = el("i", { style: `background-color: var(--c${line.color % 8})` });
    if (line.second) sample.className = "second";
    const value = el("b");
    keys.append(el("span", {}, sample, `${line.label} `, value));
    return value;
  });
  const nearest = (points, step) => points.reduce((a, b) => Math.abs(b[0] - step) < Math.abs(a[0] - step) ? b : a);
  const show = (step) => lines.forEach((line, i) => { values[i].textContent = short(nearest(line.points, step)[1]); });
  const at = (event) => {
    const box = root.getBoundingClientRect();
    const place = (event.clientX - box.left) / box.width * W;
    return x0 + (Math.min(Math.max(place, LEFT), W - RIGHT) - LEFT) / (W - LEFT - RIGHT) * (x1 - x0);
  };
  root.addEventListener("pointermove", (event) => show(at(event)));
  root.addEventListener("pointerleave", () => show(x1));
  root.addEventListener("click", (event) => pick(at(event)));
  show(x1);
  const heading = el("h3", { text: title });
  if (unit) heading.append(el("span", { class: "unit", text: `  ${unit}` }));
  const place = (step) => {
    if (step < x0 || step > x1) { mark.setAttribute("visibility", "hidden"); return; }
    mark.setAttribute("visibility", "visible");
    mark.setAttribute("x1", x(step)); mark.setAttribute("x2", x(step));
  };
  return { card: el("div", { class: "card" }, heading, root, keys), mark: place };
}
/* |pi - mu| against the ratio; pick(point) is called by a click on a point. */
function scatter(points, pick) {
  const width = 420, height = 260, left = 52, bottom = 30, top = 8, right = 8;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": "ratio pi / mu against |pi - mu|" });
  const most = Math.max(0.01, ...points.map((p) => p[0])), reach = Math.max(0.1, ...points.map((p) => Math.abs(p[1])));
  const x = (v) => left + v / most * (width - left - right);
  const y = (v) => top + (1 - (v + reach) / (2 * reach)) * (height - top - bottom);
  for (const v of [-reach, -reach / 2, 0, reach / 2, reach]) {
    root.append(svg("line", { x1: left, x2: width - right, y1: y(v), y2: y(v), class: "axis" }));
    root.append(svg("text", { x: left - 4, y: y(v) + 3, "text-anchor": "end" }, short(+(10 ** v).toPrecision(2))));
  }
  for (const v of [0, most / 2, most]) root.append(svg("text", { x: x(v), y: height - 16, "text-anchor": v ? "end" : "start" }, short(+v.toPrecision(2))));
  root.append(svg("text", { x: width - right, y: height - 3, "text-anchor": "end" }, "x: |pi - mu| of a token; y: ratio pi / mu"));
  for (const p of points) {
    const dot = svg("circle", { cx: x(p[0]).toFixed(1), cy: y(p[1]).toFixed(1), r: p[2] ? 3 : 2, fill: p[2] ? "var(--c1)" : "var(--c0)", opacity: p[2] ? 0.9 : 0.45 });
    if (p[3] >= 0) dot.addEventListener("click", () => pick(p));
    root.append(dot);
  }
  return root;
}
