// Tables, the tree of the state, and which runs are shown. All text goes in as text.

function element(tag, text, attributes = {}) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  return made;
}

// Columns are [title, class]; cells are texts.
function table(columns, rows, caption) {
  const made = element("table"), head = made.createTHead().insertRow(), body = made.createTBody();
  if (caption) made.prepend(element("caption", caption));
  for (const [title, kind] of columns) head.append(element("th", title, { scope: "col", class: kind }));
  for (const cells of rows) {
    const row = body.insertRow();
    cells.forEach((text, place) => row.append(element("td", text, { class: columns[place][1] })));
  }
  return made;
}

const NUMBER = "number", LONG = "long", UNKNOWN = "—";
const known = (value, text) => (value === undefined ? UNKNOWN : text(value));
const seconds = (value) => secondsText(1e9 * value);
const signed = (value, text = seconds) => (value > 0 ? "+" : value < 0 ? "−" : "±") + text(Math.abs(value));
const percent = (value) => `${value >= 0.01 ? (100 * value).toFixed(1) : Number((100 * value).toPrecision(2))} %`;
const count = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });

const FIGURES = [
  ["step", "step_s", seconds], [`tokens/s/${page.device}`, "tokens_per_s", count], [`examples/s/${page.device}`, "examples_per_s", count], ["MFU", "mfu", percent],
  ["peak memory", "peak_bytes", bytesText], ["peak as XLA assigns it", "assigned_bytes", bytesText], ["host memory", "host_bytes", bytesText], ["bound of any schedule", "bound_s", seconds], ["compute", "compute_s", seconds],
  ["communication", "communication_s", seconds], ["of it exposed", "exposed_communication_s", seconds], ["copies", "copy_s", seconds],
  ["copies exposed", "exposed_copy_s", seconds], ["sent by a device", "sent_bytes", bytesText],
];

const HEADLINES = new Set(["step_s", "tokens_per_s", "mfu", "peak_bytes"]);

function headlines(runs) {
  const shown = FIGURES.filter(([, name]) => HEADLINES.has(name) && runs[0].figures[name]);
  document.getElementById("headlines").replaceChildren(...shown.map(([title, name, text]) => {
    const made = element("li"), of = name === "peak_bytes" && page.limit_bytes ? ` of ${bytesText(page.limit_bytes)}` : "";
    made.append(element("span", title), element("strong", text(runs[0].figures[name])), element("small", runs[1] ? `B ${known(runs[1].figures[name], text)}` : of));
    return made;
  }));
}

function figures(runs) {
  const shown = FIGURES.filter(([, name]) => runs.some((run) => run.figures[name]));
  const columns = [["", ""], ...runs.map((run, place) => [`${"AB"[place]} ${run.name}`, NUMBER])];
  const rows = shown.map(([title, name, text]) => [title, ...runs.map((run) => known(run.figures[name], text))]);
  if (page.limit_bytes) rows.splice(shown.findIndex(([, name]) => name === "peak_bytes") + 1, 0, ["memory limit", ...runs.map(() => bytesText(page.limit_bytes))]);
  document.getElementById("figures").replaceChildren(table(columns, rows));
}

function lines(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.lines)))];
  const of = (run, name) => (run.lines[name] ?? [0, 0]);
  const sum = (run, name) => of(run, name)[0] + of(run, name)[1];
  const weight = (name) => (runs.length > 1 ? Math.abs(sum(runs[0], name) - sum(runs[1], name)) : sum(runs[0], name));
  names.sort((one, other) => weight(other) - weight(one));
  const some = names.filter((name) => runs.some((run) => Math.abs(sum(run, name)) >= 1e-9));
  const one = [["line", "line"], ["seconds", NUMBER], ["of it kernels", NUMBER], ["of it waits", NUMBER]];
  const two = [["line", "line"], ["A", NUMBER], ["B", NUMBER], ["A − B", NUMBER], ["of it waits", NUMBER]];
  const cells = (name) => {
    const [a, b] = runs;
    if (!b) return [name, seconds(sum(a, name)), seconds(of(a, name)[0]), seconds(of(a, name)[1])];
    return [name, seconds(sum(a, name)), seconds(sum(b, name)), signed(sum(a, name) - sum(b, name)), signed(of(a, name)[1] - of(b, name)[1])];
  };
  const total = runs[1] ? ["step", ...runs.map((run) => seconds(run.figures.step_s)), signed(runs[0].figures.step_s - runs[1].figures.step_s), ""]
    : ["step", seconds(runs[0].figures.step_s), "", ""];
  document.getElementById("lines").replaceChildren(table(runs[1] ? two : one, [total, ...some.map(cells)]));
}

function lineBytes(runs) {
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.line_bytes)))];
  document.getElementById("line-bytes-title").parentElement.hidden = !names.length;
  const of = (run, name) => (run.measured ? undefined : run.line_bytes[name] ?? 0);
  const weight = (name) => Math.abs((of(runs[0], name) ?? 0) - (runs[1] && of(runs[1], name) || 0));
  const some = names.filter((name) => runs.some((run) => of(run, name))).sort((one, other) => weight(other) - weight(one));
  const columns = runs[1] ? [["line", "line"], ["A", NUMBER], ["B", NUMBER], ["A − B", NUMBER]] : [["line", "line"], ["memory", NUMBER]];
  const cells = (name, [a, b]) => [name, known(a, bytesText), ...(runs[1] ? [known(b, bytesText), a === undefined || b === undefined ? UNKNOWN : signed(a - b, bytesText)] : [])];
  const rows = some.map((name) => cells(name, runs.map((run) => of(run, name))));
  document.getElementById("line-bytes").replaceChildren(table(columns, [cells("peak", runs.map((run) => run.figures.peak_bytes)), ...rows]));
}

function collectives(runs) {
  const columns = [["kind", ""], ["times", NUMBER], ["seconds", NUMBER], ["exposed", NUMBER], ["sent by a device", NUMBER]];
  document.getElementById("collectives").replaceChildren(...runs.map((run, place) => table(columns,
    run.collectives.map(([kind, times, all, exposed, sent]) => [kind, count(times), seconds(all), seconds(exposed), run.measured ? UNKNOWN : sent ? bytesText(sent) : ""]),
    `${"AB"[place]} ${run.name}`)));
}

function decisions() {
  document.getElementById("decisions").append(...page.decisions.map(([title, lines]) => {
    const made = element("li", title), list = element("ul");
    list.append(...lines.map((text) => element("li", text)));
    made.append(list);
    return made;
  }));
  const columns = [["", ""], ["strategy", ""], ["proposal", LONG], ["step before", NUMBER], ["after", NUMBER], ["memory after", NUMBER], ["why", LONG]];
  const rows = page.records.map((record) => [record.accepted ? "accepted" : "rejected", record.strategy, record.decision, seconds(record.before[0]),
    record.after ? seconds(record.after[0]) : "", record.after ? bytesText(record.after[1]) : "", record.reason]);
  if (!rows.length) { document.getElementById("records").append(element("p", "Nothing was proposed in this run.")); return; }
  const made = table(columns, rows);
  page.records.forEach((record, place) => { if (record.accepted) made.tBodies[0].rows[place].cells[0].className = "yes"; });
  document.getElementById("records").append(made);
}

// Leaves by the parts of their names; what is folded is made when it is opened.
function branch(title, found, depth) {
  const made = element("details"), head = element("summary", title), total = found.reduce((sum, leaf) => sum + leaf.bytes, 0);
  head.append(element("small", ` ${found.length} arrays, ${bytesText(total)}`));
  made.append(head);
  made.addEventListener("toggle", () => {
    const groups = new Map();
    for (const leaf of found) {
      const part = leaf.name.split("/")[depth];
      groups.set(part, [...(groups.get(part) ?? []), leaf]);
    }
    for (const [part, group] of groups) made.append(group.length > 1 ? branch(part, group, depth + 1) : leafLine(group[0], depth));
  }, { once: true });
  return made;
}

function leafLine(leaf, depth) {
  const made = element("div", leaf.name.split("/").slice(depth).join("/") || leaf.name, { class: "leaf" });
  const said = [leaf.type, leaf.placement, bytesText(leaf.bytes)];
  if (leaf.memory !== "device") said.push(`in ${leaf.memory}`);
  if (leaf.gathered.length) said.push(`gathered in ${leaf.gathered.join(", ")}`);
  made.append(element("small", ` ${said.join(" · ")}`));
  return made;
}

function state() {
  const titles = { param: "parameters", optimizer: "optimizer state", batch: "batch", other: "other" };
  for (const [role, title] of Object.entries(titles)) {
    const found = page.leaves.filter((leaf) => leaf.role === role);
    if (found.length) document.getElementById("state").append(branch(title, found, 0));
  }
  document.querySelector("#state details")?.setAttribute("open", "");
}

function legend(place, entries) {
  document.getElementById(place).replaceChildren(...entries.map(([text, colour, kind]) => {
    const made = element("li"), mark = element("i", undefined, { class: kind ?? "" });
    mark.style[kind ? "borderTopColor" : "background"] = colour;
    made.append(mark, text);
    return made;
  }));
}

function legends(runs) {
  const lanes = runs.flatMap((run) => run.lanes.filter((lane) => ["compute", "exposed"].includes(lane.name)));
  const categories = new Set(lanes.flatMap((lane) => lane.items.map((item) => item.category)));
  legend("timeline-legend", [...categories].map((each) => [each === "exposed" ? "exposed: compute waits" : each, colourOf(each)]));
  const roles = [...new Set(runs[0].blocks.items.map((item) => (isArgument(item.category) ? "arguments and results" : item.category)))];
  const curves = runs.map((run, place) => [run.measured ? `${"AB"[place]} ${run.name}: no memory is measured` : `needed, ${"AB"[place]} ${run.name}`, style("--ink"), place ? "stroke dashed" : "stroke"]);
  const limit = page.limit_bytes ? [[`memory limit ${bytesText(page.limit_bytes)}${isLimitDrawn(runs) ? "" : ", higher than is drawn"}`, style("--limit"), "stroke dashed"]] : [];
  legend("memory-legend", [...roles.map((each) => [each, colourOf(each === "arguments and results" ? RESULTS : each)]), ...curves, ...limit]);
}

function loopsText(runs) {
  const said = runs.map((run) => {
    const trips = run.loops.map(([name, , count]) => `${name} ${count} times`).join(", ");
    if (!trips) return "";
    return run.isUnrolled ? `${run.name}: of each loop one trip is simulated and drawn as often as it runs (${trips}).`
      : `${run.name}: of each loop one trip is drawn, although it runs more often (${trips}).`;
  });
  document.getElementById("unrolled").textContent = said.filter(Boolean).join(" ");
}

function draw() {
  const [a, b] = ["run-a", "run-b"].map((id) => page.runs[document.getElementById(id).value]);
  const runs = [a, ...(b && b !== a ? [b] : [])].map(prepare), step = Math.max(...runs.map((run) => run.step));
  if (step !== view.step) Object.assign(view, { from: 0, to: step, step });
  view.selected = null;
  view.charts.forEach((each) => each.destroy());
  view.charts = [timelineChart(runs), memoryChart(runs)];
  view.charts.forEach(followPointers);
  [headlines, figures, lines, lineBytes, collectives, legends, loopsText].forEach((fill) => fill(runs));
}

function start() {
  const measured = page.runs.filter((run) => run.measured).map((run) => run.name).join(", "), others = measured ? "all other" : "all";
  const said = [page.devices, `plan: ${page.origin}`, measured && `run ${measured}: seconds of it are measured`];
  if (page.runs.every((run) => run.scheduled)) said.push(`${others} seconds are simulated from XLA's schedule`);
  document.getElementById("origin").textContent = said.filter(Boolean).join(" · ");
  page.shown.forEach((run, place) => {
    const chosen = document.getElementById(["run-a", "run-b"][place]);
    chosen.append(...page.runs.map((each, at) => element("option", each.name, { value: at })));
    if (place) chosen.prepend(element("option", "nothing", { value: -1 }));
    chosen.value = place && run === page.shown[0] ? -1 : run;
    chosen.addEventListener("change", draw);
  });
  decisions();
  state();
  draw();
  followKeys(document.getElementById("timeline"), toLane, toOperation);
  followKeys(document.getElementById("memory"), toLevel, toBlock);
  document.getElementById("navigation").addEventListener("click", (event) => MOVES[event.target.dataset.move]?.());
  new ResizeObserver(() => view.charts.forEach((each) => each.setSize({ width: each.root.parentElement.clientWidth, height: each.height }))).observe(document.querySelector("main"));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { palette = {}; draw(); });
}

start();
