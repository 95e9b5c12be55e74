// What is drawn: each trip of every loop, in columns by start, and as few rectangles of them as there are pixels.

const page = JSON.parse(document.getElementById("data").textContent);
const MOST = 2e6; // operations; of a step with more of them each loop is drawn once

// By how much later than the trip that the data have of a loop each of its trips begins, of all loops around as well.
function offsets(run, loop) {
  if (loop < 0 || !run.isUnrolled) return [0];
  run.offsets ??= [];
  if (!run.offsets[loop]) {
    const [, parent, trips, began, shown, trip] = run.loops[loop];
    const before = shown > began ? 1 : 0;
    run.offsets[loop] = offsets(run, parent).flatMap((around) =>
      Array.from({ length: trips }, (_, place) => around + (place - before) * trip));
  }
  return run.offsets[loop];
}

// Items {start, end, loop} in columns, sorted by start; `item` says which of them, `nth` how often it ran before.
function unrolled(run, items) {
  const count = items.reduce((sum, each) => sum + offsets(run, each.loop).length, 0);
  const starts = new Float64Array(count), item = new Uint32Array(count), nth = new Uint32Array(count);
  let filled = 0;
  items.forEach((each, place) => offsets(run, each.loop).forEach((offset, number) => {
    starts[filled] = each.start + offset;
    item[filled] = place;
    nth[filled++] = number;
  }));
  const order = Uint32Array.from(starts.keys()).sort((one, other) => starts[one] - starts[other]);
  const made = { items, starts: Float64Array.from(order, (at) => starts[at]), item: order.map((at) => item[at]), nth: order.map((at) => nth[at]) };
  made.ends = made.starts.map((start, at) => start + items[made.item[at]].end - items[made.item[at]].start);
  return made;
}

function prepare(run) {
  if (run.lanes) return run;
  run.step = 1e9 * run.figures.step_s;
  run.events = run.events.map(([start, end, loop, trips, sent, name, op, source, category]) => ({
    start, end, loop, trips, sent, name: run.words[name], op: run.words[op], source: run.words[source], category: run.words[category],
  }));
  run.isUnrolled = run.events.reduce((sum, event) => sum + event.trips, 0) <= MOST;
  const lanes = new Map([["compute", []], ["exposed", []]]);
  for (const event of run.events) {
    const stream = isStream(event.category) ? event.category : "compute";
    if (!lanes.has(stream)) lanes.set(stream, []);
    lanes.get(stream).push(event);
  }
  for (const [start, end, loop, event, stream] of run.waits) {
    lanes.get("exposed").push({ start, end, loop, category: "exposed", stream, waited: run.events[event] });
  }
  run.lanes = [...lanes].map(([name, items]) => ({ name, ...unrolled(run, items) }));
  run.blocks = unrolled(run, blocksOf(run));
  run.live = unrolled(run, run.memory.live.map(([start, loop, bytes]) => ({ start, end: start, loop, bytes })));
  return run;
}

function blocksOf(run) {
  const base = run.memory.arguments + run.memory.outputs;
  const found = run.memory.blocks.map(([start, end, loop, address, bytes, event, role]) => ({
    start, end, loop, low: base + address, high: base + address + bytes, bytes, category: run.words[role], made: run.events[event],
  }));
  const of = (role) => page.leaves.filter((leaf) => leaf.role === role && leaf.memory === "device").reduce((sum, leaf) => sum + leaf.bytes, 0);
  const parts = [["parameters", of("param")], ["optimizer state", of("optimizer")], ["batch", of("batch")]];
  const rest = run.memory.arguments - parts.reduce((sum, [, bytes]) => sum + bytes, 0);
  const arguments_ = rest < 0 ? [["arguments", run.memory.arguments]] : [...parts, ["other arguments", rest]];
  let low = 0;
  for (const [category, bytes] of [...arguments_, [RESULTS, run.memory.outputs]]) {
    if (bytes) found.push({ start: 0, end: run.step, loop: -1, low, high: low + bytes, bytes, category });
    low += bytes;
  }
  return found;
}

const isStream = (category) => !["matrix products", "fused attention", "computed again", "elementwise and other"].includes(category);

// The place of the first of the sorted `values` that is above `value`.
function above(values, value) {
  let low = 0, high = values.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] > value) high = middle; else low = middle + 1;
  }
  return low;
}

// Calls draw(start, end, category) for what of a lane is seen; what is hardly wider than a pixel is drawn with its neighbours.
function eachSeen(lane, from, to, pixels, draw) {
  const { starts, ends, item, items } = lane, pixel = (to - from) / pixels, narrow = 2 * pixel;
  let at = above(ends, from), held = null;
  while (at < starts.length && starts[at] < to) {
    const start = starts[at];
    let end = ends[at], category = items[item[at]].category;
    if (end - start >= narrow) {
      if (held) draw(held.start, held.end, held.category);
      held = null;
      draw(start, end, category);
      at++;
      continue;
    }
    const weights = new Map();
    for (let most = 0; at < starts.length && ends[at] - starts[at] < narrow && ends[at] - start < 1.5 * narrow; at++) {
      const each = items[item[at]].category, weight = (weights.get(each) ?? 0) + ends[at] - starts[at];
      weights.set(each, weight);
      if (weight > most) [most, category] = [weight, each];
      end = Math.max(ends[at], start + pixel);
    }
    if (held && held.category === category && start - held.end < pixel) held.end = end;
    else {
      if (held) draw(held.start, held.end, held.category);
      held = { start, end, category };
    }
  }
  if (held) draw(held.start, held.end, held.category);
}

// The same of blocks of memory, of which `rows` of pixels hold `top` bytes: calls draw(start, end, low, high, category).
function eachBlock(blocks, from, to, pixels, top, rows, draw) {
  const { starts, ends, item, items } = blocks, pixel = (to - from) / pixels, held = new Map();
  for (let at = 0; at < starts.length && starts[at] < to; at++) {
    if (ends[at] < from) continue;
    const { low, high, category } = items[item[at]], start = starts[at], end = ends[at];
    if (end - start >= 3 * pixel && high - low >= top / rows) { draw(start, end, low, high, category); continue; }
    const place = `${Math.round((low / top) * rows)} ${Math.round((high / top) * rows)} ${category}`, before = held.get(place);
    if (before && start - before.end < pixel) { before.end = Math.max(before.end, end); continue; }
    if (before) draw(before.start, before.end, before.low, before.high, category);
    held.set(place, { start, end, low, high, category });
  }
  for (const { start, end, low, high, category } of held.values()) draw(start, end, low, high, category);
}

// The curve of live bytes as corners (time, bytes); where there are more of them than pixels, the most of each pixel.
function eachCorner(live, from, to, pixels, draw) {
  const { starts, item, items } = live;
  const first = Math.max(0, above(starts, from) - 1), last = above(starts, to);
  const pixel = last - first > 2 * pixels ? (to - from) / pixels : 0;
  for (let at = first; at < last;) {
    let most = items[item[at]].bytes;
    const start = starts[at++];
    for (; at < last && starts[at] - start < pixel; at++) most = Math.max(most, items[item[at]].bytes);
    draw(start, most);
  }
}
