"use strict";
// Summary tiles and curves, drawn as SVG. Text is only ever set as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const rewardName = JSON.parse(document.getElementById("reward-name").textContent);
const tip = document.getElementById("tip");
const COLOURS = ["#3b82f6", "#f59e0b", "#10b981", "#a78bfa", "#ef4444", "#14b8a6", "#ec4899", "#84cc16"];

function element(tag, { text, children = [], ...attributes } = {}) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  node.append(...children);
  return node;
}

function svg(tag, attributes, text) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

function number(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  if (size >= 1000) return Math.round(value).toLocaleString("en");
  return size >= 0.001 ? String(+value.toPrecision(4)) : value.toExponential(2);
}

function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const right = event.clientX + 14 + tip.offsetWidth > window.innerWidth;
  tip.style.left = `${right ? event.clientX - 14 - tip.offsetWidth : event.clientX + 14}px`;
  tip.style.top = `${Math.min(event.clientY + 14, window.innerHeight - tip.offsetHeight - 8)}px`;
}

function hideTip() { tip.hidden = true; }

// Round numbers that span [low, high] in about `count` steps.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((m) => m * power).find((size) => size >= rough);
  const marks = [];
  for (let mark = Math.ceil(low / step) * step; mark <= high + step * 1e-9; mark += step) {
    marks.push(+mark.toPrecision(12));
  }
  return marks;
}

function movingMean(points) {
  const window = Math.min(Math.max(Math.floor(points.length / 10), 5), 50);
  return points.map(([step], end) => {
    const recent = points.slice(Math.max(0, end - window + 1), end + 1)
      .map((point) => point[1]).filter((value) => value !== null);
    return [step, recent.length ? recent.reduce((a, b) => a + b) / recent.length : null];
  });
}

// One figure. `lines`: {name, points: [[step, value|null]], colour, faint}. With `stacked`, each
// line lies on top of the one before.
function chart(title, lines, { height = 170, stacked = false } = {}) {
  const caption = element("figcaption", { children: [element("span", { text: title })] });
  if (lines.length > 1) {
    for (const line of lines) {
      caption.append(element("i", { text: line.name, style: `--swatch:${line.colour}` }));
    }
  }
  const canvas = svg("svg", { height, role: "img", "aria-label": title });
  const figure = element("figure", { class: "chart", children: [caption, canvas] });
  new ResizeObserver(() => draw(canvas, lines, height, stacked)).observe(figure);
  return figure;
}

function stack(lines) {
  const below = new Map();
  return lines.map((line) => ({
    ...line,
    area: line.points.map(([step, value]) => {
      const floor = below.get(step) ?? 0;
      below.set(step, floor + (value ?? 0));
      return [step, floor, floor + (value ?? 0)];
    }),
  }));
}

function draw(canvas, lines, height, stacked) {
  const width = canvas.clientWidth;
  if (!width) return;
  const layers = stacked ? stack(lines) : lines;
  const heights = stacked
    ? [0, ...layers.flatMap((layer) => layer.area.map((point) => point[2]))]
    : layers.flatMap((line) => line.points.map((point) => point[1])).filter((v) => v !== null);
  const steps = lines.flatMap((line) => line.points.map((point) => point[0]));
  if (!heights.length) {
    canvas.replaceChildren(svg("text", { x: 8, y: 24 }, "no finite value"));
    return;
  }
  let [low, high] = [Math.min(...heights), Math.max(...heights)];
  if (low === high) [low, high] = [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const [first, last] = [Math.min(...steps), Math.max(...steps)];
  const box = { left: 52, right: 12, top: 10, bottom: 22 };
  const x = (step) => box.left + (first === last ? 0.5 : (step - first) / (last - first)) * (width - box.left - box.right);
  const y = (value) => height - box.bottom - ((value - low) / (high - low)) * (height - box.top - box.bottom);
  const parts = [];
  for (const mark of ticks(low, high, 5)) {
    parts.push(svg("line", { x1: box.left, x2: width - box.right, y1: y(mark), y2: y(mark), class: "grid" }));
    parts.push(svg("text", { x: box.left - 6, y: y(mark) + 4, "text-anchor": "end" }, number(mark)));
  }
  const marks = first === last ? [first] : ticks(first, last, Math.max(width / 80, 2));
  for (const mark of marks.filter(Number.isInteger)) {
    parts.push(svg("text", { x: x(mark), y: height - 6, "text-anchor": "middle" }, number(mark)));
  }
  for (const layer of layers) parts.push(...(stacked ? [area(layer, x, y)] : curve(layer, x, y)));
  const cursor = svg("line", { y1: box.top, y2: height - box.bottom, class: "cursor", visibility: "hidden" });
  canvas.replaceChildren(...parts, cursor);
  follow(canvas, cursor, lines, steps, x);
}

function curve(line, x, y) {
  let path = "", pen = "M";
  for (const [step, value] of line.points) {
    if (value === null) { pen = "M"; continue; }
    path += `${pen}${x(step).toFixed(1)},${y(value).toFixed(1)}`;
    pen = "L";
  }
  const parts = [svg("path", {
    d: path, fill: "none", stroke: line.colour, "stroke-linejoin": "round",
    "stroke-width": line.faint ? 1 : 2, opacity: line.faint ? 0.45 : 1,
  })];
  if (line.points.length <= 24 && !line.faint) {
    for (const [step, value] of line.points) {
      if (value !== null) parts.push(svg("circle", { cx: x(step), cy: y(value), r: 2.5, fill: line.colour }));
    }
  }
  return parts;
}

function area(layer, x, y) {
  const top = layer.area.map(([step, , value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`);
  const bottom = layer.area.map(([step, value]) => `${x(step).toFixed(1)},${y(value).toFixed(1)}`);
  return svg("polygon", { points: [...top, ...bottom.reverse()].join(" "), fill: layer.colour, opacity: 0.75 });
}

// A vertical line and the values at the nearest step, under the mouse.
function follow(canvas, cursor, lines, steps, x) {
  canvas.onmousemove = (event) => {
    const at = event.clientX - canvas.getBoundingClientRect().left;
    const near = steps.reduce((a, b) => (Math.abs(x(b) - at) < Math.abs(x(a) - at) ? b : a));
    cursor.setAttribute("x1", x(near));
    cursor.setAttribute("x2", x(near));
    cursor.setAttribute("visibility", "visible");
    const values = lines.flatMap((line) => {
      const point = line.points.find(([step]) => step === near);
      return point ? [`${line.name}  ${number(point[1])}`] : [];
    });
    showTip(event, [`step ${near}`, ...values].join("\n"));
  };
  canvas.onmouseleave = () => { cursor.setAttribute("visibility", "hidden"); hideTip(); };
}

function tiles() {
  const labels = {
    reward_first: "reward, first steps", reward_last: "reward, last steps", steps: "steps",
    train_seconds: "seconds", tokens_sampled: "tokens sampled", tokens_trained: "tokens trained",
  };
  let facts = Object.entries(data.summary).filter(([, value]) => typeof value !== "object");
  const rewards = data.series[rewardName] ?? [];
  if (!facts.length && rewards.length) {
    facts = [["steps so far", rewards.length], ["latest reward", rewards.at(-1)[1]]];
  }
  const section = document.getElementById("summary");
  for (const [name, value] of facts) {
    section.append(element("div", { class: "tile", children: [
      element("b", { text: number(value) }),
      element("span", { text: labels[name] ?? name.replaceAll("_", " ") }),
    ] }));
  }
}

function rewardChart(rewards) {
  const lines = [
    { name: "mean of the step", points: rewards, colour: "#94a3b8", faint: true },
    { name: "moving mean", points: movingMean(rewards), colour: COLOURS[0] },
  ];
  const evaluated = data.series["eval/reward_mean"];
  if (evaluated) lines.push({ name: "evaluation", points: evaluated, colour: COLOURS[1] });
  return chart("Reward", lines, { height: 260 });
}

function phaseChart(names) {
  const lines = names.map((name, index) => (
    { name: name.slice("time/".length), points: data.series[name], colour: COLOURS[index % COLOURS.length] }
  ));
  return chart("Seconds by phase", lines, { stacked: true });
}

function curves() {
  const section = document.getElementById("curves");
  const names = Object.keys(data.series);
  if (!names.length) section.append(element("p", { class: "quiet", text: "No step has been logged yet." }));
  const rewards = data.series[rewardName];
  const large = rewards ? [rewardChart(rewards)] : [];
  const phases = names.filter((name) => name.startsWith("time/") && name !== "time/step");
  const small = phases.length ? [phaseChart(phases)] : [];
  for (const name of names) {
    if (name === rewardName || phases.includes(name)) continue;
    small.push(chart(name, [{ name, points: data.series[name], colour: COLOURS[0] }]));
  }
  section.append(
    element("div", { class: "charts large", children: large }),
    element("div", { class: "charts", children: small }),
  );
}

tiles();
curves();
