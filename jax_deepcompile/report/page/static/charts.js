// Two charts that show the same time: streams, and memory. uPlot draws; this says where things are.

const COLOURS = {
  "matrix products": "--products", "fused attention": "--attention", "computed again": "--again", "elementwise and other": "--other", exposed: "--exposed",
  "all-gather": "--gather", "reduce-scatter": "--reduce", "to host": "--to-host", "from host": "--from-host",
  "gathered from other devices": "--gather", "kept for the backward pass": "--kept", "being computed": "--computed", gradients: "--reduce",
  logits: "--attention", "workspace of libraries": "--moved", other: "--from-host",
};
const RESULTS = "results with memory of their own";
const view = { from: 0, to: 1, step: 1, gutter: 70, charts: [], selected: null };
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let palette = {};
function colourOf(category) {
  return (palette[category] ??= style(COLOURS[category.replace(" in a node", "")] ?? (isArgument(category) ? "--arguments" : "--moved")));
}
const isArgument = (category) => ["parameters", "optimizer state", "batch", "other arguments", "arguments", RESULTS].includes(category);

function secondsText(ns) {
  if (!ns) return "0 s";
  const [size, unit] = Math.abs(ns) >= 1e9 ? [1e9, "s"] : Math.abs(ns) >= 1e6 ? [1e6, "ms"] : Math.abs(ns) >= 1e3 ? [1e3, "µs"] : [1, "ns"];
  return `${Number((ns / size).toPrecision(4))} ${unit}`;
}
function bytesText(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let place = 0;
  while (Math.abs(bytes) >= 1024 && place < 4) { bytes /= 1024; place++; }
  return `${bytes.toFixed(place ? 1 : 0)} ${units[place]}`;
}

// A series that is only rectangles or lines, in places that `build(put, from, to, pixels, rows)` puts them at.
function drawn(build, { edge = 0, ...options } = {}) {
  return {
    width: 0, points: { show: false }, ...options,
    paths: (u) => {
      const { min, max } = u.scales.x, fill = new Map(), stroke = new Path2D();
      const x = (value) => u.valToPos(value, "x", true), y = (value) => u.valToPos(value, "y", true);
      let last = null;
      build({
        rect(start, end, low, high, colour) {
          const left = Math.max(x(start), u.bbox.left - 9), right = Math.min(x(end), u.bbox.left + u.bbox.width + 9), top = y(high);
          if (right < left) return;
          if (!fill.has(colour)) fill.set(colour, new Path2D());
          fill.get(colour).rect(left, top, Math.max(right - left, 1), Math.max(y(low) - top - edge, 1));
        },
        frame(start, end, low, high) { stroke.rect(x(start), y(high), Math.max(x(end) - x(start), 2), y(low) - y(high)); },
        corner(time, value) {
          if (last === null) stroke.moveTo(x(time), y(value));
          else { stroke.lineTo(x(time), last); stroke.lineTo(x(time), y(value)); }
          last = y(value);
        },
      }, min, max, u.bbox.width, u.bbox.height);
      return { fill, stroke, flags: 0 };
    },
  };
}

function chart(place, height, series, axis, range) {
  document.getElementById(place).replaceChildren();
  const made = new uPlot({
    width: document.getElementById(place).clientWidth, height, series: [{}, ...series],
    legend: { show: false }, padding: [8, 14, 0, 0],
    cursor: { y: false, drag: { x: false, y: false }, points: { show: false }, sync: { key: "time" } },
    scales: { x: { time: false, range: () => [view.from, view.to] }, y: { range: () => range } },
    axes: [
      { stroke: () => style("--soft"), grid: { stroke: () => style("--line"), width: 1 }, ticks: { show: false }, space: 80, size: 28,
        values: (u, splits) => splits.map(secondsText) },
      { stroke: () => style("--soft"), ticks: { show: false }, size: view.gutter, font: "12px system-ui, sans-serif", ...axis },
    ],
  }, [[0, view.step], ...series.map(() => [0, 0])], document.getElementById(place));
  return made;
}

// Streams of each run, one below the other.
function timelineChart(runs) {
  const lanes = runs.flatMap((run, place) => run.lanes.map((lane) => ({ lane, run, label: runs.length > 1 ? `${"AB"[place]} ${lane.name}` : lane.name })));
  lanes.forEach((each, place) => { each.high = lanes.length - place - 0.1 - (runs.length > 1 && each.run === runs[1] ? 0.5 : 0); each.low = each.high - 0.8; });
  view.gutter = 14 + 6.6 * Math.max(...lanes.map(({ label }) => label.length));
  const bottom = runs.length > 1 ? -0.5 : 0, middles = lanes.map((each) => (each.low + each.high) / 2);
  const bars = drawn((put, from, to, pixels) => {
    for (const { lane, low, high } of lanes) {
      eachSeen(lane, from, to, pixels, (start, end, category) => put.rect(start, end, low, high, colourOf(category)));
    }
  });
  const made = chart("timeline", 24 * (lanes.length - bottom) + 36, [bars, selection()], {
    splits: () => middles, grid: { show: false }, values: () => lanes.map((each) => each.label), gap: 4,
  }, [bottom, lanes.length]);
  made.find = (time, value) => {
    const each = lanes.find(({ low, high }) => low <= value && value <= high);
    return each ? laneItem(each, nearest(each.lane, time, 3 * (view.to - view.from) / made.bbox.width)) : null;
  };
  made.lanes = lanes;
  return made;
}

// The place of what a lane runs at `time`, or `within` of it.
function nearest(lane, time, within) {
  const at = above(lane.ends, time);
  const gap = (place) => (place < 0 || place >= lane.starts.length ? Infinity : Math.max(lane.starts[place] - time, time - lane.ends[place], 0));
  const best = gap(at - 1) < gap(at) ? at - 1 : at;
  return gap(best) <= within ? best : -1;
}

function laneItem(each, at) {
  if (at < 0) return null;
  const { lane, run, low, high } = each, item = lane.items[lane.item[at]];
  const seen = { chart: "timeline", each, at, start: lane.starts[at], end: lane.ends[at], low, high };
  const times = offsets(run, item.loop).length, taken = item.end - item.start;
  const often = times > 1 ? `, time ${lane.nth[at] + 1} of ${times}, ${secondsText(times * taken)} in all` : item.trips > 1 ? `, ${item.trips} times` : "";
  const of = item.waited;
  const what = item.category === "exposed" ? `compute waits for ${of ? `${of.category} ${of.name}` : item.stream}` : `${item.category}: ${item.name}`;
  const sent = item.sent ? `, ${bytesText(item.sent)} sent by a device` : "";
  seen.text = [`${run.name}: ${what}`, `${secondsText(taken)}${often}${sent}, from ${secondsText(seen.start)}`, (of ?? item).source, (of ?? item).op].filter(Boolean).join("\n");
  return seen;
}

const peakOf = (runs) => Math.max(1, ...runs.map((run) => run.figures.peak_bytes ?? 0));
const isLimitDrawn = (runs) => page.limit_bytes !== null && page.limit_bytes < 2 * peakOf(runs);

function memoryChart(runs) {
  const peak = peakOf(runs), { blocks } = runs[0];
  const top = 1.06 * (isLimitDrawn(runs) ? Math.max(page.limit_bytes, peak) : peak);
  const taken = drawn((put, from, to, pixels, rows) => {
    eachBlock(blocks, from, to, pixels, top, rows, (start, end, low, high, category) => put.rect(start, end, low, high, colourOf(category)));
  }, { edge: 0.7 });
  const curves = runs.map((run, place) => drawn((put, from, to, pixels) => eachCorner(run.live, from, Math.min(to, run.step), pixels, put.corner),
    { width: 1.5, stroke: () => style("--ink"), dash: place ? [5, 4] : undefined }));
  const limit = drawn((put, from, to) => { if (isLimitDrawn(runs)) { put.corner(from, page.limit_bytes); put.corner(to, page.limit_bytes); } },
    { width: 2, stroke: () => style("--limit"), dash: [9, 5] });
  const step = niceStep(top);
  const made = chart("memory", 340, [taken, ...curves, limit, selection()], {
    splits: () => Array.from({ length: Math.floor(top / step) + 1 }, (_, place) => place * step),
    values: (u, splits) => splits.map((bytes) => (top > 2 ? bytesText(bytes) : "")), grid: { stroke: () => style("--line"), width: 1 },
  }, [0, top]);
  made.find = (time, value) => {
    for (let at = blocks.starts.length - 1; at >= 0; at--) {
      const item = blocks.items[blocks.item[at]];
      if (item.low <= value && value < item.high && blocks.starts[at] <= time && time < blocks.ends[at]) return blockItem(runs[0], blocks, at, time);
    }
    const needed = ({ name, step, live }) => {
      const item = time > step ? undefined : live.items[live.item[Math.max(0, above(live.starts, time) - 1)]];
      return item ? `${name}: ${bytesText(item.bytes)} needed at ${secondsText(time)}` : `${name}: nothing is known to be needed at ${secondsText(time)}`;
    };
    return { chart: "memory", text: runs.map(needed).join("\n") };
  };
  made.run = runs[0];
  return made;
}

function niceStep(top) {
  const unit = 2 ** Math.floor(Math.log2(top / 4));
  return top / unit > 6 ? 2 * unit : unit;
}

// `time` is where one points in it.
function blockItem(run, blocks, at, time) {
  const item = blocks.items[blocks.item[at]], start = blocks.starts[at], end = blocks.ends[at];
  const text = [`${run.name}: ${item.category}, ${bytesText(item.bytes)}${item.made ? `, by ${item.made.name}` : ""}`,
    `needed for ${secondsText(end - start)}, from ${secondsText(start)}`, item.made?.source, item.made?.op].filter(Boolean).join("\n");
  return { chart: "memory", at, time, start, end, low: item.low, high: item.high, text };
}

function selection() {
  const own = (u) => view.selected?.start !== undefined && u.root.parentElement.id === view.selected.chart;
  return { ...drawn(() => {}), width: 2, stroke: () => style("--ink"), paths: (u, ...rest) =>
    drawn((put) => { if (own(u)) put.frame(view.selected.start, view.selected.end, view.selected.low, view.selected.high); }).paths(u, ...rest) };
}

function show(from, to) {
  const least = 200, width = Math.min(Math.max(to - from, least), view.step);
  view.from = Math.min(Math.max(from, 0), view.step - width);
  view.to = view.from + width;
  for (const each of view.charts) each.setScale("x", { min: view.from, max: view.to });
}
const zoom = (factor, at = (view.from + view.to) / 2) => show(at - (at - view.from) * factor, at + (view.to - at) * factor);
const centre = (time) => show(time - (view.to - view.from) / 2, time + (view.to - view.from) / 2);
const pan = (share) => show(view.from + share * (view.to - view.from), view.to + share * (view.to - view.from));
const MOVES = { earlier: () => pan(-0.25), later: () => pan(0.25), closer: () => zoom(0.5), wider: () => zoom(2), all: () => show(0, view.step) };

function select(found) {
  view.selected = found;
  document.getElementById("details").textContent = found?.text ?? "";
  for (const each of view.charts) each.redraw(true, false);
}

// Pointers: one drags, two pinch, none that is down points.
function followPointers(made) {
  const { over } = made, down = new Map();
  let moved = 0;
  const time = (event) => made.posToVal(event.clientX - over.getBoundingClientRect().left, "x");
  const point = (event) => {
    const found = made.find(time(event), made.posToVal(event.clientY - over.getBoundingClientRect().top, "y"));
    if (found?.text !== view.selected?.text) select(found);
  };
  over.addEventListener("pointerdown", (event) => { down.set(event.pointerId, event); moved = 0; over.setPointerCapture(event.pointerId); });
  over.addEventListener("pointermove", (event) => {
    const before = down.get(event.pointerId);
    if (!before) { point(event); return; }
    const width = over.clientWidth, others = [...down.values()].filter((each) => each.pointerId !== event.pointerId);
    moved += Math.abs(event.clientX - before.clientX);
    if (!others.length) pan((before.clientX - event.clientX) / width);
    else zoom(Math.abs(before.clientX - others[0].clientX) / Math.max(Math.abs(event.clientX - others[0].clientX), 1), time(others[0]));
    down.set(event.pointerId, event);
  });
  over.addEventListener("pointerup", (event) => { if (moved < 4) point(event); down.delete(event.pointerId); });
  over.addEventListener("pointercancel", (event) => down.delete(event.pointerId));
  over.addEventListener("dblclick", MOVES.all);
  over.addEventListener("wheel", (event) => {
    if (event.ctrlKey || event.metaKey) zoom(1.0015 ** event.deltaY, time(event));
    else if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) pan(event.deltaX / over.clientWidth);
    else return;
    event.preventDefault();
  }, { passive: false });
}

// Keys: what pointers can do, and up, down, back and on from what is selected.
function followKeys(element, toRow, toNext) {
  const keys = { ArrowLeft: MOVES.earlier, ArrowRight: MOVES.later, "+": MOVES.closer, "=": MOVES.closer, "-": MOVES.wider, 0: MOVES.all, Home: MOVES.all,
    ArrowUp: () => toRow(-1), ArrowDown: () => toRow(1), ",": () => toNext(-1), ".": () => toNext(1) };
  element.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !keys[event.key]) return;
    event.preventDefault();
    keys[event.key]();
  });
}

function toLane(by) {
  const { lanes } = view.charts[0], now = lanes.indexOf(view.selected?.each);
  const each = lanes[Math.min(Math.max(now + by, 0), lanes.length - 1)], middle = (view.from + view.to) / 2;
  const found = laneItem(each, nearest(each.lane, view.selected?.start ?? middle, Infinity));
  select(found ?? { chart: "timeline", each, text: `${each.label}: nothing runs` });
}

function toOperation(by) {
  const { each, at } = view.selected ?? {};
  if (!each) { toLane(0); return; }
  const found = laneItem(each, Math.min(Math.max((at ?? 0) + by, 0), each.lane.starts.length - 1));
  if (!found) return;
  if (found.start < view.from || found.end > view.to) centre((found.start + found.end) / 2);
  select(found);
}

const selectedBlock = () => (view.selected?.chart === "memory" ? view.selected.at : undefined);

function toBlock(by) {
  const { run } = view.charts[1], { blocks } = run, at = selectedBlock() ?? above(blocks.starts, (view.from + view.to) / 2) - 1 - by;
  if (!blocks.starts.length) return;
  const next = Math.min(Math.max(at + by, 0), blocks.starts.length - 1), time = blocks.starts[next];
  if (time < view.from || time > view.to) centre(time);
  select(blockItem(run, blocks, next, time));
}

// Among the blocks of one time, from the highest down.
function toLevel(by) {
  const { run } = view.charts[1], { blocks } = run, now = selectedBlock();
  const time = now === undefined ? (view.from + view.to) / 2 : view.selected.time, low = (at) => blocks.items[blocks.item[at]].low;
  const found = [...blocks.starts.keys()].filter((at) => blocks.starts[at] <= time && time < blocks.ends[at]).sort((one, other) => low(other) - low(one));
  const place = now === undefined ? (by > 0 ? 0 : found.length - 1) : Math.min(Math.max(found.indexOf(now) + by, 0), found.length - 1);
  if (!found.length) return;
  if (time < view.from || time > view.to) centre(time);
  select(blockItem(run, blocks, found[place], time));
}
