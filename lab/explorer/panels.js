// Draws the panels of one run at one moment, recorded or computed: `view` is {run, number, now,
// panels: {name: element}, states, ...}, see build() in page.js. Whatever comes from a prompt
// enters the page as textContent, never as HTML.

// --- words and elements --------------------------------------------------------------------------

function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag);
  const {style, data, ...others} = properties;
  if (style) node.style.cssText = style;
  Object.assign(node.dataset, data);
  Object.assign(node, others);
  node.append(...children);
  return node;
}

const soft = text => element("p", {className: "soft"}, text);
const bold = text => element("b", {}, text);
const div = (className, ...children) => element("div", {className}, ...children);

function part(kind, share, properties) { // of a bar
  const style = `width: ${100 * share}%`;
  return element("span", {className: kind, style, ...properties});
}

const wholeNumbers = new Intl.NumberFormat("en-US");
const tenths = new Intl.NumberFormat(
  "en-US", {minimumFractionDigits: 1, maximumFractionDigits: 1});
const number = n => wholeNumbers.format(n);
const ms = x => tenths.format(x) + " ms";
const percent = (n, of, what) => of ? `${Math.round(100 * n / of)}% of ${what}` : "";
const mean = values => sumOf(values) / values.length;

function plural(n, noun) {               // "1 pass", "2 passes", "2,000 slots"
  const ending = noun.endsWith("s") ? "es" : "s";
  return `${number(n)} ${noun}${n === 1 ? "" : ending}`;
}

// --- what the run was, and whether it was right --------------------------------------------------

function verdicts({idea, knobs, place, check, xray}) {
  const details = Object.entries(check.wrong ?? {}).map(
    ([name, detail]) => ` WRONG: ${name}: ${detail}.`);
  const settings = Object.entries(knobs).filter(([, value]) => value !== null);
  const words = settings.map(([name, value]) => `${name} ${value}`);
  return [
    element("p", {}, idea), soft([...words, place].join(", ")),
    verdict("Check", !check.wrong, details.length, check.summary, ...details),
    verdict("X-ray", xray.left_out, xray.wrong, xrayWords(xray))];
}

function verdict(name, isUnknown, isWrong, ...words) {
  let className = isWrong ? "bad" : "fine";
  if (isUnknown) className = "soft";
  return element("p", {className}, bold(name + ": "), ...words);
}

function xrayWords({left_out: leftOut, wrong, sentences}) {
  if (leftOut) return `left out: ${leftOut}`;
  if (!wrong) return "every token saw its own request up to itself, and nothing else";
  const times = plural(wrong, "time");
  return `${times} a token saw what it must not: ${sentences.join("; ")} …`;
}

// --- inks and patterns ---------------------------------------------------------------------------

const INKS = ["prefill", "decode", "recomputed", "finished", "blank", "stripe", "ink", "soft",
              "waiting", "alarm"];

function inks(canvas) {                  // colours of page.css, as the theme resolves them
  const colors = {};
  for (const name of INKS) {
    canvas.style.color = `var(--${name})`;
    colors[name] = getComputedStyle(canvas).color;
  }
  return colors;
}

function hatching(pen, color, ...directions) {   // true: a stripe that goes up
  const tile = element("canvas", {width: 6, height: 6}), stroke = tile.getContext("2d");
  stroke.strokeStyle = color;
  for (const up of directions) {
    for (const x of [-6, 0, 6]) {
      stroke.moveTo(x, up ? 6 : 0);
      stroke.lineTo(x + 6, up ? 0 : 6);
    }
  }
  stroke.stroke();
  return pen.createPattern(tile, "repeat");
}

function painter(pen, ink) {             // paint(kind, x, y, width, height)
  const fills = {
    prefill: [ink.prefill], decode: [ink.decode], recomputed: [ink.recomputed],
    pad: [ink.blank, hatching(pen, ink.stripe, true)],
    finished: [ink.finished, hatching(pen, "#ffffffb0", true, false)]};
  return (kind, x, y, width, height) => {
    for (const fill of fills[kind]) {
      pen.fillStyle = fill;
      pen.fillRect(x, y, width, height);
    }
    markForGrey(pen, kind, x, y, width, height);
  };
}

function markForGrey(pen, kind, x, y, width, height) {   // what differs in colour alone
  if (kind === "decode" && height > 5) {
    pen.fillStyle = "#ffffffb0";
    pen.fillRect(x, y + height - 3, width, 1);
  }
  if (kind === "recomputed" && height > 3 && width > 3) {
    pen.fillStyle = "#000000aa";
    pen.fillRect(x + width / 2 - 1, y + height / 2 - 1, 2, 2);
  }
}

// --- the timeline --------------------------------------------------------------------------------

// A row for each request and a column for each step, as in the repository's pictures.

const BAND = 24, AXIS = 16;              // pixels: the slots of each step, and the numbers below

// view.high: pixels of a row, if it is given; view.bare: the names stand beside it.
function drawTimeline(view) {
  const {run, panels: {timeline}} = view;
  const wide = timeline.clientWidth || 300;   // asked before anything changes: else it takes long
  const canvas = element("canvas", {
    ariaLabel: `${run.name}: every request in each of ${plural(run.steps.length, "step")}`});
  canvas.setAttribute("role", "img");
  view.cursor = element("div", {className: "cursor"});
  view.box = element("div", {className: "box"}, canvas, view.cursor);
  const [first, next] = longWaits(run, timeline);
  timeline.replaceChildren(
    view.box, ...waitWords(run, first, next),
    ...run.check ? [div("verdicts", ...verdicts(run))] : []);

  const place = {...placeOf(view, canvas, wide), first, next};
  Object.assign(view, {
    end: place.end, wide,
    valueAt: pixels => place.end * (pixels - place.labels) / (wide - place.labels - 2),
    across: step => state.clock === "ms" ? place.span(step.start, step.end)
      : place.span(step.step, step.step + 1)});
  run.requests.forEach((request, r) => drawRow(view, place, request, r));
  drawBand(view, place);
  place.pen.fillStyle = place.ink.soft;
  if (place.labels) place.pen.fillText("slots", 0, place.floor - BAND / 2);
  view.drawAxis = covered => drawAxis(place, run.base, covered);
  view.drawAxis(null);
}

// Where things lie on the canvas, which gets its size, in pixels. x(value of the clock);
// span(from, to) -> [left, width]; floor: of the requests' rows and the band; labels: the width of
// what stands left of the rows.
function placeOf(view, canvas, wide) {
  const {requests, passes} = view.run;
  const high = view.high ?? Math.max(1, Math.min(13, Math.floor(240 / requests.length)));
  const named = high > 8 && !view.bare;
  const letters = Math.min(8, largest(requests.map(({name}) => name.length)));
  const needsLabels = named || (state.own && !view.bare);
  const labels = needsLabels ? Math.max(36, 8 + 7 * letters) : 0;
  const floor = requests.length * high + 6 + BAND;
  const pen = penFor(canvas, wide, floor + AXIS), ink = inks(canvas);
  const end = state.held ?? largest(shown().map(endOf));
  const x = value => labels + (wide - labels - 2) * Math.max(0, value) / end;

  function span(from, to) {
    if (x(to) - x(from) < 3) return [x(from), Math.max(0.6, x(to) - x(from))];
    const left = Math.round(x(from)), width = Math.round(x(to)) - left;   // sharp edges
    return [left, width > 6 ? width - 1 : width];
  }

  function acrossPass(pass) {
    if (state.clock === "ms") {
      return span(passes.begin[pass], passes.begin[pass] + passes.ms[pass]);
    }
    return span(passes.step[pass], passes.step[pass] + 1);
  }

  return {pen, ink, paint: painter(pen, ink), x, span, acrossPass, end, wide, high, named, labels,
          floor, thick: high > 4 ? high - 1 : high};
}

function penFor(canvas, wide, high) {    // for the screen's own pixels
  const ratio = window.devicePixelRatio || 1, pen = canvas.getContext("2d");
  canvas.width = wide * ratio;
  canvas.height = high * ratio;
  canvas.style.height = high + "px";
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, sans-serif";
  pen.textBaseline = "middle";
  return pen;
}

// How far the axis goes: steps, or milliseconds.
function endOf({steps}) {
  if (!steps.length) return 1;
  return valueOf(steps.at(-1)) + (state.clock === "step" ? 1 : 0);
}

// Of waits for a first token, and between two, {longest, shaded: how long those are that are red};
// none is while the walk asks. Red is what is long beside the other run, too.
function longWaits(run, timeline) {
  const asks = timeline.closest(".asking");
  const firstWaits = ({waits}) => waits;
  const nextWaits = ({gaps}) => gaps.map(([, gap]) => gap);
  return [firstWaits, nextWaits].map(waitsOf => {
    const waits = waitsOf(run);
    const longestOfAll = largest(shown().flatMap(waitsOf));
    const usual = waits.length ? mean(waits) : 0;
    const shaded = asks ? Infinity : Math.max(0.9 * longestOfAll, 1.5 * usual);
    return {longest: largest(waits), shaded};
  });
}

function waitWords(run, first, next) {
  if (state.clock !== "ms" || !run.waits.length) return [];
  return [element("p", {},
                  longestWait(first, "Longest wait for a first token: ", " (red line)"),
                  longestWait(next, "; for a next one: ", " (red frames)"), ".")];
}

function longestWait({longest, shaded}, words, mark) {
  const isRed = longest > shaded;
  return element("span", {className: isRed ? "longest" : ""}, words, ms(longest),
                 isRed ? mark : "");
}

function drawRow(view, place, request, r) {
  const {pen, ink, high, labels, named} = place, middle = (r + 0.5) * high;
  pen.fillStyle = ink.ink;
  if (named) pen.fillText(request.name.slice(0, 8), 0, middle);
  if (request.refused) {
    pen.fillStyle = ink.alarm;
    pen.fillText(`can never run: ${request.refused}`, labels + 4, middle);
    return;
  }
  drawWork(view, place, request, r);
  if (state.clock === "ms") drawLongWaits(place, request, r);
}

// Its passes, and a line while it waits.
function drawWork({run, across}, place, request, r) {
  const {pen, ink, x, high, acrossPass} = place, middle = (r + 0.5) * high;

  function line(from, to) {
    pen.fillStyle = ink.waiting;
    pen.fillRect(from, middle - 0.5, Math.max(0, to - from), 1);
  }

  let since = x(state.clock === "ms" ? request.arrived : request.arrival);
  for (const work of request.work) {
    const [left, width] = acrossPass(work.pass);
    line(since, left);
    since = left + width;
    drawSlots(run, place, work, r * high, left, width);
  }
  const mayWaitStill = !request.reason && run.steps.length;   // in a live run
  if (mayWaitStill) {
    const [left, width] = across(run.steps.at(-1));
    line(since, left + width);
  }
}

// A request's slots in a pass: its row in the tensor, if it has one of its own. Tokens above, pads
// below.
function drawSlots(run, {paint, thick}, {pass, n, parts}, top, left, width) {
  const [B, T] = run.passes.shape[pass];
  const rows = run.work[pass].length + (run.passes.finished[pass]?.length ?? 0);
  const slots = T && B === rows ? T : n;
  let y = top;
  for (const [kind, count] of [...parts, ["pad", slots - n]]) {
    const height = thick * count / slots;
    if (count) paint(kind, left, y, width, height);
    y += height;
  }
}

function drawLongWaits({pen, ink, x, high, thick, first, next}, request, r) {
  pen.strokeStyle = ink.alarm;
  pen.lineWidth = 2;
  for (const [i, time] of request.ms.entries()) {
    const nextTime = request.ms[i + 1];
    if (nextTime - time > next.shaded) {
      pen.strokeRect(x(time), r * high, x(nextTime) - x(time), Math.max(thick, 3));
    }
  }
  if (request.ms[0] - request.arrived > first.shaded) {
    const from = x(request.arrived);
    pen.fillStyle = ink.alarm;
    pen.fillRect(from, r * high + thick - 2, x(request.ms[0]) - from, 2);
  }
}

function drawBand({run, across}, place) {   // each step's slots
  const {paint, high, thick, floor, acrossPass} = place;
  const slots = shown().flatMap(other => other.steps.map(step => inStep(other, "slots", step)));
  const tallest = largest(slots);
  for (const step of run.steps) {
    const [left, width] = across(step);
    let y = floor;
    for (const [kind, count] of Object.entries(slotsByKind(run, step))) {
      const height = BAND * count / tallest;
      y -= height;
      if (height) paint(kind, left, y, width, height);
    }
  }
  for (const pass of run.work.keys()) {
    const [left, width] = acrossPass(pass);
    for (const r of run.passes.finished[pass] ?? []) {
      paint("finished", left, r * high, width, thick);
    }
  }
}

function slotsByKind(run, step) {
  const counts = {decode: 0, prefill: 0, recomputed: 0,
                  pad: inStep(run, "pad_slots", step),
                  finished: inStep(run, "finished_slots", step)};
  const works = step.passes.flatMap(pass => run.work[pass]);
  for (const [kind, n] of works.flatMap(({parts}) => parts)) counts[kind] += n;
  return counts;
}

// covered: [from, to] in pixels, where the cursor's badge stands; no number lies there.
function drawAxis({pen, x, ink, floor, labels, end, wide}, base = 0, covered = null) {
  pen.clearRect(0, floor, wide, AXIS);
  pen.fillStyle = ink.soft;
  pen.fillRect(labels, floor, wide - labels, 1);
  const unit = unitOf(60 * end / (wide - labels));   // its numbers are 60 pixels apart, or more
  const firstTick = Math.ceil(base / unit) * unit - base;
  let label = state.clock === "step" ? " steps" : " ms";   // beside the first number
  for (let value = firstTick; value < end; value += unit) {
    pen.fillRect(x(value), floor, 1, 4);
    const text = number(base + value) + label;
    const from = x(value) + 3, to = from + pen.measureText(text).width;
    const hidden = covered && from < covered[1] && to > covered[0];
    if (to < wide && !hidden) pen.fillText(text, from, floor + 10);
    label = "";
  }
}

function unitOf(least) {                 // 1, 2, 5, 10, 20, ...: the first that is as large
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  return [1, 2, 5, 10].map(factor => factor * power).find(unit => unit >= least);
}

function moveCursor(view) {
  const {run, now, cursor, across, wide} = view;
  cursor.hidden = !run.steps.length;
  if (cursor.hidden) return;
  cursor.dataset.step = `step ${now.step + (run.base ?? 0)}`;
  const [left, width] = across(run.steps[Math.max(now.k, 0)]);
  const isBusy = now.passes.length > 0, isLate = left > wide / 2;
  const from = (isBusy ? left : left + width) - 2;   // else the cursor stands behind the step
  const to = from + (isBusy ? width : 0) + 4;
  cursor.style.left = from + "px";
  cursor.style.width = to - from + "px";
  cursor.classList.toggle("late", isLate);
  const badge = 10 + 6.5 * cursor.dataset.step.length;   // pixels, about
  view.drawAxis(isLate ? [to - badge, to] : [from, from + badge]);
}

// --- the plan: the token budget as a bar. Decodes come first, then chunks of prompts -------------

function partsNow({run, now}) {          // [request's name, kind, tokens] of each part of the plan
  const works = now.passes.flatMap(pass => run.work[pass]);
  return works.flatMap(({owner, parts}) => {
    const {name} = run.requests[owner];
    return parts.map(([kind, n]) => [name, kind, n]);
  });
}

function planWords({run, now}, parts) {
  if (!now.passes.length) return nothing(now);
  const budget = run.knobs.token_budget, tokens = sumOf(parts.map(([, , n]) => n));
  const of = budget ? `${tokens} of ${plural(budget, "token")}, the token budget`
    : `${plural(tokens, "token")}, without a budget`;
  const partsOf = kind => parts.filter(([, other]) => other === kind).map(
    ([name, , n]) => `${name} (${n})`);
  const decodes = partsOf("decode"), prefills = partsOf("prefill"), again = partsOf("recomputed");
  const items = [];
  if (decodes.length) items.push(plural(decodes.length, "decode"));
  if (prefills.length) items.push(`prefill of ${atMostEight(prefills)}`);
  if (again.length) items.push(`${atMostEight(again)} computed again`);
  return `${of}: ${items.join(", then ")}.${padWords(run, now)}`;
}

function atMostEight(names) {
  return names.slice(0, 8).join(", ") + (names.length > 8 ? ", …" : "");
}

function padWords(run, now) {            // where slots are computed for nothing
  const pads = inStep(run, "pad_slots", now), finished = inStep(run, "finished_slots", now);
  if (!pads && !finished) return "";
  const slots = plural(inStep(run, "slots", now), "slot");
  return ` ${number(pads + finished)} of its ${slots} are pads${finished ? " or finished" : ""}.`;
}

function drawPlan(view) {
  const {run, panels: {plan}} = view, parts = partsNow(view);
  const scale = Math.max(run.knobs.token_budget ?? 0, run.mostTokens);
  const bars = parts.map(([name, kind, n]) => {
    const label = `${name}: ${n}`, fits = n * plan.clientWidth / scale > 8 * label.length;
    const title = `${name}: ${plural(n, "token")}, ${DATA.names[kind]}`;
    return part(kind, n / scale, {title, textContent: fits ? label : ""});
  });
  plan.replaceChildren(div("bar", ...bars), element("p", {}, planWords(view, parts)));
}

function nothing(now) {
  return now.over ? "This run is over: all its requests are done."
    : "Nothing is computed: no request has arrived.";
}

// --- the tensor: every slot of every pass of the step, in its true shape -------------------------

function drawTensor(view) {
  const {run, now, panels: {tensor}} = view;
  view.slots = new Map();                // a slot's name -> its element
  const passes = now.passes.map((pass, k) => {
    const grid = run.computed ? barsOf(run, pass) : div("scroll", gridOf(view, pass));
    const which = now.passes.length > 1 ? `, pass ${k + 1} of ${now.passes.length}` : "";
    const words = element("p", {}, bold(shapeWords(run, pass)), which + passWords(run, pass));
    return element("div", {className: "pass", data: {pass}}, words, grid);
  });
  // Room for the tallest step, so that the panels below stay where they are.
  run.tallest ??= largest(run.steps.map(step => heightOf(run, step)));
  tensor.style.minHeight = Math.min(run.tallest, 420) + "px";
  tensor.replaceChildren(...passes.length ? passes : [soft(nothing(now))]);
  for (const box of tensor.querySelectorAll(".scroll")) box.scrollLeft = box.scrollWidth;
}

function shapeWords(run, pass) {         // as Python writes a tuple
  const shape = run.passes.shape[pass];
  return shape.length === 1 ? `shape (${shape[0]},)` : `shape (${shape.join(", ")})`;
}

const SLOTS = [["useful", "useful"], ["recomputed", "computed again"], ["pad_slots", "pads"],
               ["finished_slots", "finished"]];

function passWords({passes, computed}, pass) {
  const counts = SLOTS.filter(([name]) => passes[name][pass]).map(
    ([name, words]) => `${number(passes[name][pass])} ${words}`);
  const clock = DATA.calculated || computed ? ", calculated" : "";
  return `: ${plural(passes.slots[pass], "slot")}, ${counts.join(", ")}; `
    + `${ms(passes.ms[pass])}${clock}`;
}

function heightOf(run, step) {           // of a step's tensors, in pixels, about
  return sumOf(step.passes.map(pass => {
    const shape = run.passes.shape[pass];
    if (shape.length === 1) return 40 + 45;
    return 40 + shape[0] * (rowHeight(shape) + 1);
  }));
}

function rowHeight(shape) {              // in pixels; of many rows, each is lower
  const isTall = shape.length > 1 && shape[0] > 16;
  return isTall ? 13 : 22;
}

// A computed run has no texts and no sights: its rows are bars, to scale. A stream is one row.
function barsOf(run, pass) {
  const rows = rowsOf(run, pass), [B, T] = run.passes.shape[pass];
  if (!T) return div("bar", ...rows.flatMap(row => barParts(run, row, B, true)));
  return div("bars", ...rows.flatMap(row => {
    const {name} = run.requests[row.owner];
    return [bold(name), div("bar", ...barParts(run, row, T, false))];
  }));
}

function barParts(run, {owner, n, parts}, width, isStream) {
  const {name} = run.requests[owner];
  const pads = isStream ? 0 : width - n;
  const counts = n ? [["pad", pads], ...parts] : [["finished", width]];
  return counts.filter(([, count]) => count > 0).map(([kind, count]) => {
    const share = count / width, isNamed = isStream && share >= 0.04;
    const title = `${name}: ${count} ${DATA.names[kind]}`;
    return part(kind, share, {title, textContent: isNamed ? name : ""});
  });
}

// The slots as elements, each with its token.
function gridOf(view, pass) {
  const {run, number: viewNumber} = view, shape = run.passes.shape[pass];
  const isStream = shape.length === 1, rows = slotsOf(run, pass).owner;
  const names = rows.map(row => rowNames(run, row));
  const labels = isStream ? 0 : 4 + 8 * largest(names.map(name => Math.min(8, name.length)));
  const {cell, gap} = cellSize(view.panels.tensor, shape.at(-1), labels);
  const columns = `${isStream ? "" : labels + "px "}repeat(${shape.at(-1)}, ${cell}px)`;
  const ring = cell < 10 ? "4px 0 0" : "0 0 2px";
  const grid = element("div", {
    className: "grid", tabIndex: 0, data: {pass, view: viewNumber},
    ariaLabel: "Slots; the arrow keys move from one to the next",
    style: `--high: ${rowHeight(shape)}px; --ring: ${ring}; column-gap: ${gap}px; `
      + `grid-template-columns: ${columns}`});
  grid.setAttribute("role", "application");
  if (isStream) grid.append(...boundaries(run, rows[0], cell));
  for (const [row, title] of names.entries()) {
    if (!isStream) grid.append(element("span", {className: "name", title}, title));
    grid.append(...slotElements(view, pass, row, cell));
  }
  return grid;
}

function rowNames(run, row) {
  return ownersOf(row).map(owner => run.requests[owner].name).join(" ");
}

// As wide as fits, so that no slot is out of sight; under 5 pixels, without gaps between them.
function cellSize(tensor, columns, labels) {
  const fits = (tensor.clientWidth - 6 - labels) / columns;
  const hasGap = fits >= 5;
  const cell = hasGap ? Math.floor(fits) - 1 : fits;
  return {cell: Math.max(1, Math.min(64, cell)), gap: hasGap ? 1 : 0};
}

function boundaries(run, row, cell) {    // a name above each request's part of the stream
  return ownersOf(row).map(owner => {
    const {name} = run.requests[owner], n = row.filter(other => other === owner).length;
    const fits = n * cell > 9 * name.length;
    return element("span", {className: "name above", title: name, textContent: fits ? name : "",
                            style: `grid-column: span ${n}`});
  });
}

function slotElements({run, number: viewNumber, slots}, pass, row, cell) {
  const {owner: owners, position: positions} = slotsOf(run, pass);
  return owners[row].map((owner, column) => {
    const slot = [viewNumber, pass, row, column].join(".");
    const position = positions[row][column], before = owners[row][column - 1];
    const isEdge = owner >= 0 && before >= 0 && owner !== before;
    const className = `slot ${kindOf(run, pass, owner, position)}${isEdge ? " edge" : ""}`;
    const textContent = owner >= 0 && cell > 16 ? word(run, owner, position) : "";
    const node = element("i", {className, textContent, data: {slot}});
    slots.set(slot, node);
    return node;
  });
}

// --- the change: one step's slots in the shapes of several stages --------------------------------

// Where motion is welcome, they move.

const SHAPES = ["two passes", "one rectangle", "without the pads", "one stream"];
const CHANGE_ROW = 20;                   // pixels

function drawChange(panel, step) {
  const [passes, rectangle, stream] = ["chunked", "interleaved", "ragged"].map(name => {
    const run = recorded(name);
    return {run, passes: run.stepOf.get(step).passes};
  });
  const width = Math.max(rectangle.run.passes.shape[rectangle.passes[0]][1],
                         stream.run.passes.slots[stream.passes[0]]);
  const cell = Math.min(44, (panel.clientWidth - 8) / width);
  const cells = new Map();
  const rows = largest([placeSlots(cells, 0, passes), placeSlots(cells, 1, rectangle),
                        placeSlots(cells, 3, stream)]);
  const nodes = [...cells.values()].map(slot => changeNode(slot, cell));
  const bottom = CHANGE_ROW * rows;
  const box = div("change", ...nodes.map(({node}) => node));
  box.style.height = bottom + 30 + "px";
  const facts = changeFacts(passes, rectangle, stream);
  const fact = element("p", {ariaLive: "polite"});
  let later = null;                      // a timer: the next shape
  const buttons = div("shapes", ...SHAPES.map((name, shape) => element("button", {onclick: () => {
    clearTimeout(later);
    show(shape);
  }}, name)));

  function show(shape) {
    for (const {node, places} of nodes) moveTo(node, places, shape, cell, bottom);
    fact.textContent = facts[shape];
    for (const [i, button] of [...buttons.children].entries()) {
      button.ariaPressed = String(i === shape);
    }
  }

  function showFrom(shape) {             // and the shapes after it, one after another
    show(shape);
    if (shape === 3) return;
    later = setTimeout(() => box.isConnected && showFrom(shape + 1), 1400);
  }

  panel.replaceChildren(buttons, box, fact);
  showFrom(matchMedia("(prefers-reduced-motion: reduce)").matches ? 3 : 0);
}

// Adds where each slot is in a shape, by token or pad, to cells: {key: {kind, word, places: {shape:
// [column, row]}}}. Returns the number of rows.
function placeSlots(cells, shape, {run, passes}) {
  let top = 0;
  for (const pass of passes) {
    const {owner: owners, position: positions} = slotsOf(run, pass);
    for (const [row, rowOwners] of owners.entries()) {
      for (const [column, owner] of rowOwners.entries()) {
        const position = positions[row][column];
        const isPad = owner < 0;
        const key = isPad ? `pad ${shape} ${row} ${column}` : `${owner}.${position}`;
        if (!cells.has(key)) {
          const kind = kindOf(run, pass, owner, position);
          cells.set(key, {kind, word: isPad ? "" : word(run, owner, position), places: {}});
        }
        cells.get(key).places[shape] = [column, top + row];
      }
    }
    top += owners.length + 0.6;
  }
  return top;
}

function changeNode({kind, word: text, places}, cell) {
  const style = `width: ${Math.max(1, cell - 1)}px; height: ${CHANGE_ROW - 1}px`;
  const textContent = cell < 20 ? "" : text;
  const node = element("i", {className: "slot " + kind, textContent, style});
  return {node, places: {...places, 2: places[3] && places[1]}};   // a pad is in no stream
}

function moveTo(node, places, shape, cell, bottom) {
  const here = places[shape], [x, y] = here ?? places[1] ?? places[0];
  const fallsOut = !here && shape > 1;
  node.style.transform = `translate(${x * cell}px, ${fallsOut ? bottom : y * CHANGE_ROW}px)`;
  node.style.opacity = here ? 1 : 0;
}

function changeFacts(passes, rectangle, stream) {   // a sentence for each shape
  const sum = ({run, passes: list}, name) => inStep(run, name, {passes: list});
  const [inTwo, inOne, inStream] = [passes, rectangle, stream].map(shape => {
    const counts = [plural(shape.passes.length, "pass"), plural(sum(shape, "slots"), "slot"),
                    plural(sum(shape, "pad_slots"), "pad")];
    return `${shape.run.name}: ${counts.join(", ")}, ${ms(sum(shape, "ms"))}.`;
  });
  const pads = sum(rectangle, "pad_slots"), tokens = sum(rectangle, "slots") - pads;
  return [inTwo, inOne, `${pads} pads fall out: ${tokens} tokens remain.`, inStream];
}

// --- who sees whom: the keys of the slot that is pointed at, or held, and where they are ---------

function drawPointed() {
  const name = pointed ?? state.slot, picked = slotNamed(name);
  for (const view of views) {
    for (const node of view.lit ?? []) node.classList.remove("lit", "picked", "wrong");
    view.lit = [];
    if (view.slots) drawSees(view, name, picked);
  }
}

function drawSees(view, name, picked) {
  const {run, now, panels: {sees = div()}} = view;
  const [viewNumber, pass, row, column] = picked ?? [];
  if (run.xray.left_out) {
    sees.replaceChildren(soft(`Not measured in this run: ${run.xray.left_out}.`));
    return;
  }
  if (viewNumber !== view.number || !now.passes.includes(pass)) {
    sees.replaceChildren(soft("Point at a slot of the tensor to see which keys it sees. "
                              + "A click or a tap holds it."));
    return;
  }
  const slot = slotAt(run, pass, row, column), keys = markedKeys(run, pass, row, slot);
  sees.replaceChildren(sentence(run, slot, keys), strip(run, pass, keys));
  const firstWrong = sees.querySelector(".wrong")?.offsetTop ?? 0;
  sees.lastChild.scrollTop = firstWrong - sees.lastChild.offsetTop;
  lightUp(view, name, picked, keys);
}

function sentence(run, slot, keys) {
  if (slot.owner < 0) return padSentence(run, slot, keys);
  const count = mark => keys.filter(key => key.owner >= 0 && key.mark === mark).length;
  const past = count("past"), fresh = count("new"), wrong = count("wrong");
  const pads = keys.filter(key => key.owner < 0 && key.mark === "wrong").length;
  const faults = faultsOf(slot, pads, wrong, count("missing"));
  const {owner, position, kind} = slot, text = word(run, owner, position);
  const who = `${run.requests[owner].name}, position ${position}, “${text}” (${DATA.names[kind]})`;
  return element(
    "p", {}, bold(who), ` sees ${plural(past + fresh + wrong + pads, "key")}: `
      + `${past} past, ${fresh} new, ${plural(pads, "pad")}.`,
    element("span", {className: "bad"}, faults.length ? ` Wrong: ${faults.join(", ")}.` : ""));
}

function faultsOf({position, shift}, pads, wrong, missing) {
  const faults = [];
  if (pads) faults.push(`it sees ${plural(pads, "pad")}`);
  if (wrong) faults.push(`it sees ${plural(wrong, "key")} that it must not`);
  if (missing) faults.push(`it does not see ${plural(missing, "key")} of its own`);
  if (shift) faults.push(`it is computed as if at position ${position + shift}`);
  return faults;
}

function padSentence(run, {owner}, keys) {
  const who = owner === -1 ? "A pad"
    : `A slot of ${run.requests[-2 - owner].name}, which is finished,`;
  const seesKeys = keys.some(({mark}) => ["past", "new", "wrong"].includes(mark));
  return element("p", {}, bold(who), seesKeys
    ? " sees keys, too, but what it computes is never read."
    : " here sees no key. It is computed all the same, and never read.");
}

function strip(run, pass, keys) {        // all keys of its row, in order
  const node = element("div", {className: "keys scroll", tabIndex: 0});
  let placeBefore = "";
  for (const key of keys) {
    const place = placeWords(run, pass, key), isPad = key.owner < 0;
    if (place !== placeBefore) node.append(bold(place));
    placeBefore = place;
    const who = isPad ? "pad" : `${run.requests[key.owner].name}, position ${key.position}`;
    const textContent = isPad ? "·" : word(run, key.owner, key.position);
    node.append(element("i", {className: key.mark, title: `${who}: ${key.mark}`, textContent}));
  }
  return node;
}

function placeWords(run, pass, key) {
  if (!key.past) return "new";
  const page = pageOf(run, pass, key);
  return page === null ? "past" : `page ${page}`;
}

function lightUp(view, name, [viewNumber, pass, row], keys) {
  const {run, slots, lit, panels: {memory}} = view;

  function light(node, ...classes) {
    if (!node) return;
    node.classList.add(...classes);
    lit.push(node);
  }

  light(slots.get(name), "picked");
  for (const key of keys) {
    const slot = slots.get([viewNumber, pass, row, key.column].join("."));
    if (key.mark === "wrong" && !key.past) light(slot, "lit", "wrong");
    if (key.mark === "new") light(slot, "lit");
    if (key.mark === "past") {
      const page = pageOf(run, pass, key);
      light(memory?.querySelector(`[data-holder="${key.owner}"]`), "lit");
      light(memory?.querySelector(`[data-page="${page}"]`), "lit");
    }
  }
}

// --- requests: how far each one is, and its text so far ------------------------------------------

const MANY = 40;                         // of more, only those under way are listed
const STATES = {absent: "not arrived", waiting: "waiting", prefill: "prefilling",
                decode: "decoding", recomputed: "computed again", preempted: "preempted",
                done: "done"};

function drawRequests(view) {
  const {run, states, rows, panels: {requests}} = view, few = run.requests.length <= MANY;
  const listed = [];
  for (const [r, request] of run.requests.entries()) {
    const isIdle = ["absent", "waiting", "done"].includes(states[r].kind);
    if (isIdle && !few) continue;
    if (!rows.has(r)) rows.set(r, requestRow(request));
    fillRow(rows.get(r), request, states[r], run.slowed);
    listed.push(rows.get(r).node);
  }
  if (!view.list) {
    view.list = element("div", {className: "scroll", tabIndex: 0});
    requests.replaceChildren(element("p"), view.list);
  }
  requests.firstChild.textContent = stateCounts(states)
    + (few ? "." : ". Only those under way are listed.");
  showNodes(view.list, listed);
}

function stateCounts(states) {
  const counts = Object.entries(STATES).map(
    ([kind, words]) => [states.filter(one => one.kind === kind).length, words]);
  return counts.filter(([n]) => n).map(([n, words]) => `${n} ${words}`).join(", ");
}

function showNodes(list, nodes) {        // those that are there already stay: they keep the focus
  const {children} = list;
  const isSame = nodes.length === children.length && nodes.every((node, i) => node === children[i]);
  if (!isSame) list.replaceChildren(...nodes);
}

function requestRow(request) {
  const [stateNode, waits, prompt, answer] = ["state", "waits", "prompt", "answer"].map(
    className => element("span", {className}));
  const text = element(
    "button", {className: "text", title: "all of the text, or its end", dir: "auto"},
    element("span", {className: "lines"}, prompt, answer));
  const head = element("div", {}, bold(request.name), stateNode, waits);
  const node = element("div", {className: "request", data: {request: request.name}}, head, text);
  const row = {node, state: stateNode, prompt, answer, waits, texts: [textOf(request.prompt), ""]};
  text.onclick = () => {
    node.classList.toggle("open");
    fillTexts(row);
  };
  return row;
}

function fillTexts({node, prompt, answer, texts: [promptText, answerText]}) {
  const open = node.classList.contains("open");
  const shownAnswer = open ? answerText : tail(answerText, 150);
  const room = Math.max(20, 150 - shownAnswer.length);
  prompt.textContent = (open ? promptText : tail(promptText, room)) + " ▸ ";
  answer.textContent = shownAnswer;
}

function tail(text, n) {                 // its last n characters
  const characters = [...text];
  return characters.length > n ? "…" + characters.slice(-n).join("") : text;
}

function fillRow(row, request, {words, active, tokens}, slowed) {
  const shownState = [words, active, tokens].join();
  if (shownState === row.shownState) return;   // most rows stay as they are from step to step
  row.shownState = shownState;
  row.node.classList.toggle("running", active);
  row.state.textContent = words;
  row.texts[1] = textOf(request.generated.slice(0, tokens));
  fillTexts(row);
  row.waits.textContent = tokens ? latencyWords(request, tokens, slowed)
    : `prompt of ${plural(request.prompt.length, "token")}`;
}

function latencyWords({ms: times, arrived, arrival, steps}, tokens, slowed) {
  const first = plural(steps[0] - arrival + 1, "step");
  const start = `${plural(tokens, "token")} · TTFT ${first}`;
  if (slowed) return start;              // its milliseconds mean nothing
  const gaps = gapsOf(times.slice(0, tokens));
  const itl = gaps.length ? `\nITL mean ${ms(mean(gaps))}, longest ${ms(largest(gaps))}` : "";
  return `${start}, ${ms(times[0] - arrived)}${itl}`;
}

// --- memory: each request's cache within its room, or the pool and the block tables --------------

function drawMemory(view) {
  const {run, panels: {memory}} = view;
  const lines = Math.min(run.knobs.max_batch ?? 1, run.requests.length);   // the most holders
  memory.style.minHeight = `${2.5 + 1.4 * lines}rem`;
  memory.replaceChildren(...memoryNodes(view));
}

function memoryNodes(view) {
  const {run, now, states} = view;
  const hasCaches = run.requests.some(request => request.rooms.length);
  if (!hasCaches) {
    return [soft("This run keeps no keys and values: every step computes all tokens again.")];
  }
  const all = run.requests.map(({name}, r) => ({...states[r], r, name}));
  const holders = all.filter(({holds, kind}) => {
    const hasLeft = kind === "done" && now.over;
    return holds !== null && !hasLeft;
  });
  return run.pool ? poolNodes(view, holders) : cachesOf(run, now, holders);
}

function cachesOf(run, now, holders) {
  const rooms = run.requests.flatMap(request => request.rooms);
  run.largest ??= largest(rooms.map(({room}) => room ?? 0));
  const columns = run.passes.columns[now.pass] ?? 0;
  const rows = holders.map(holder => cacheRow(holder, columns, run.largest));
  const used = sumOf(holders.map(({computed}) => computed));
  const room = sumOf(holders.map(({holds}) => holds));
  const limit = run.knobs.max_kv_tokens;
  const bars = limit
    ? [div("bar", part("past", used / limit), part("room", (room - used) / limit))] : [];
  const limitWords = limit ? `at most ${number(limit)} may be reserved.` : "no limit was set.";
  const words = `${plural(used, "token")} in caches with room for ${number(room)}; ${limitWords}`;
  return [element("p", {}, words), ...bars, div("scroll", ...rows)];
}

// columns: of a static batch, whose rows share a cache; else 0
function cacheRow({r, name, computed, holds}, columns, largestRoom) {
  const pads = Math.max(0, columns - computed);
  const parts = [part("past", computed / holds)];
  if (pads) parts.push(part("pad", pads / holds));
  const bar = element(
    "div", {className: "bar", style: `width: ${100 * holds / largestRoom}%`}, ...parts);
  const padNote = pads ? `, ${pads} columns of pads and finished slots` : "";
  return element(
    "div", {className: "holder", title: plural(computed, "token") + padNote, data: {holder: r}},
    bold(name), bar, `${computed} of ${holds}`);
}

function poolNodes(view, holders) {
  const {run, now} = view, {pages: pageCount} = run.pool;
  const isTiny = pageCount > (innerWidth <= 760 ? 64 : 160);
  view.pages ??= Array.from({length: pageCount}, (_, page) => element("div", {data: {page}}));
  view.pool ??= div("pool" + (isTiny ? " tiny" : ""), ...view.pages);
  const {owners, filled} = usedPages(run.pool, holders);
  const cached = new Set(run.passes.cached[now.pass] ?? []);
  const counts = {held: 0, shared: 0, cached: 0, free: 0};
  for (const [page, node] of view.pages.entries()) {
    const kind = kindOfPage(owners[page], cached.has(page));
    counts[kind] += 1;
    fillPage(node, page, kind, owners[page], filled[page], run.pool.page_size, isTiny);
  }
  const tables = holders.map(({r, name, holds}) => element(
    "div", {className: "holder table", data: {holder: r}}, bold(name),
    element("span", {}, holds.join(" "))));
  return [
    element("p", {}, poolWords(run, counts)), view.pool,
    element("p", {}, bold("Block tables"), ": a request's pages in the order of its tokens"),
    div("scroll", ...tables)];
}

// Of each page: the names of the requests that hold it, and how many of its tokens are computed.
function usedPages({pages: pageCount, page_size: size}, holders) {
  const owners = Array.from({length: pageCount}, () => []);
  const filled = Array(pageCount).fill(0);
  for (const {name, holds, computed} of holders) {
    for (const [i, page] of holds.entries()) {
      const tokens = Math.min(size, computed - i * size);
      owners[page].push(name);
      filled[page] = Math.max(filled[page], tokens);
    }
  }
  return {owners, filled};
}

function kindOfPage(owners, isCached) {
  if (owners.length > 1) return "shared";
  if (owners.length) return "held";
  return isCached ? "cached" : "free";
}

function fillPage(node, page, kind, owners, tokens, size, isTiny) {
  const title = `page ${page}, ${pageWords(kind, owners, tokens, size)}`;
  if (node.title === title) return;      // most pages stay as they are from step to step
  node.title = title;
  node.className = `page ${kind}${isTiny ? " tiny" : ""}`;
  const labels = isTiny ? [] : [element("small", {}, String(page)), pageLabel(kind, owners)];
  node.replaceChildren(
    ...labels, element("u", {style: `width: ${100 * tokens / size}%`}));
}

function pageWords(kind, owners, tokens, size) {
  if (owners.length) {
    return `in the block tables of ${owners.join(", ")} (ref_count ${owners.length}), `
      + `${tokens} of ${size} tokens`;
  }
  return kind === "cached" ? "in the free queue, cached" : "in the free queue";
}

function pageLabel(kind, owners) {
  if (kind === "shared") return `${owners[0]} +${owners.length - 1}`;
  if (kind === "held") return owners[0];
  return kind === "cached" ? "cached" : "";
}

function poolWords({pool, computed, knobs}, {held, shared, cached, free}) {
  const more = computed && knobs.pages > pool.pages
    ? " More these requests could never fill." : "";
  return `${held + shared} of ${plural(pool.pages, "page")} in block tables, `
    + `${shared} of them in several; ${cached + free} in the free queue, `
    + `${cached} of them cached; ${plural(pool.page_size, "token")} in a page.${more}`;
}

// --- the bill: sums over all passes so far -------------------------------------------------------

const BILL = {   // what a line means
  "useful tokens": "tokens that are computed for the first time",
  finished: "slots of requests that are done, in a batch that is not",
  "computed again": "tokens that had been computed before",
  "scores, a head and layer": "products of a query and a key",
  "useful scores": "those that the causal rule uses",
  "padded keys": "keys that attention reads beside the requests' own",
  "copied keys and values": "gathered into a rectangle, or from pages",
  "TTFT, mean": "time to a request's first token", "ITL, mean": "time between two of its tokens"};

function drawBill(view) {
  const lines = [...countRows(view), ...timeRows(view)].map(
    ([name, value, note = ""]) => element(
      "tr", {}, element("th", {scope: "row", title: BILL[name] ?? ""}, name),
      element("td", {}, value), element("td", {className: "soft"}, note)));
  view.panels.bill.replaceChildren(element("table", {}, ...lines));
}

// Tokens that a live run's requests had before its first step.
const tokensBefore = ({steps}) => atMost(steps, -1);
const total = (run, now, name) => now.pass < 0 ? 0 : run.totals[name][now.pass];

function countRows({run, now, states}) {
  const sum = name => total(run, now, name);
  const ofSlots = name => [number(sum(name)), percent(sum(name), sum("slots"), "slots")];
  const before = sumOf(run.requests.map(tokensBefore));
  const generated = sumOf(states.map(({tokens}) => tokens)) - before;
  return [
    ["forward passes", number(now.pass + 1)],
    ["generated tokens", number(generated)],
    ["slots", number(sum("slots"))],
    ["useful tokens", ...ofSlots("useful")],
    ["pads", ...ofSlots("pad_slots")],
    ["finished", ...ofSlots("finished_slots")],
    ["computed again", ...ofSlots("recomputed")],
    ["scores, a head and layer", number(sum("score_entries"))],
    ["useful scores", number(sum("useful_scores")),
     percent(sum("useful_scores"), sum("score_entries"), "scores")],
    ["padded keys", number(sum("padded_keys"))],
    ["copied keys and values", (sum("copied_bytes") / 1e6).toFixed(1) + " MB"]];
}

function timeRows({run, now, states}) {
  const answered = run.requests.filter((request, r) => states[r].tokens && !tokensBefore(request));
  const firstWaits = answered.map(({ms: times, arrived}) => times[0] - arrived);
  const gaps = atMost(run.gaps, now.step, ([step]) => step);
  const [, , sum, longest] = run.gaps[gaps - 1] ?? [];
  const slowed = run.slowed ? "slowed" : "";
  return [
    ["time in passes", ms(total(run, now, "ms")),
     DATA.calculated || run.computed ? "calculated" : ""],
    ["TTFT, mean", answered.length ? ms(mean(firstWaits)) : "–",
     slowed || plural(answered.length, "request")],
    ["ITL, mean", gaps ? ms(sum / gaps) : "–", slowed],
    ["ITL, longest", gaps ? ms(longest) : "–", slowed]];
}

// --- the scoreboard: a line for each stage's figuresOf, calculated -------------------------------

const rounded = x => number(Math.round(x));

function memoryCell([held, limit]) {
  return [number(held), element("small", {}, limit ? ` of ${number(limit)}` : " no limit")];
}

const SCORES = {   // figure: title, its text, what it means
  passes: ["passes", number, "forward passes"],
  useful: ["useful", x => Math.round(100 * x) + "%",
           "share of the slots that hold a token, for the first time"],
  speed: ["tokens/s", rounded, "tokens per second"],
  first: ["TTFT, ms", rounded, "the longest wait for a first token"],
  next: ["worst gap, ms", rounded, "the longest time between two tokens of a request"],
  at_once: ["at once", number, "the most requests that run at the same time"],
  memory: ["memory, tokens", memoryCell,
           "the most keys and values that have room reserved in a pass"]};
const EXPLAINED = ["useful", "next", "at_once", "memory"];   // below the table
const WITH_BARS = ["speed", "first", "next"];

// scores: {stage: its figures; null: no request fits; undefined: not computed yet}
// pick(name): shows its run, if it is given; marked: {stage: a note, "shown" among others}
function scoreboard(scores, pick, marked = {}) {
  const ran = Object.values(scores).filter(Boolean);
  const isLimited = ran.some(({memory: [, limit]}) => limit);
  const bars = barScales(ran);
  const heads = Object.values(SCORES).map(
    ([text, , title]) => element("th", {scope: "col", title}, text));
  const head = element("tr", {}, element("th", {scope: "col"}, "stage"), ...heads);
  const lines = Object.entries(scores).map(([name, score]) => {
    const isUnlimited = isLimited && score && !score.memory[1];
    return element("tr", {className: isUnlimited ? "unlimited" : ""},
                   scoreTitle(name, score, pick, marked[name]), ...scoreCells(score, bars));
  });
  const meanings = EXPLAINED.map(figure => {
    const [title, , meaning] = SCORES[figure];
    return `${title}: ${meaning}`;
  });
  return div("", element("table", {className: "scores"}, head, ...lines),
             soft(meanings.join("; ") + "."));
}

function barScales(ran) {                // {figure: its largest value}; 0: all are about the same
  const scales = {};
  for (const figure of WITH_BARS) {
    const values = ran.map(score => score[figure]);
    const greatest = largest(values);
    scales[figure] = greatest > 1.05 * Math.min(...values) ? greatest : 0;
  }
  return scales;
}

function scoreTitle(name, score, pick, mark) {
  const title = pick ? element("button", {
    onclick: () => pick(name), ariaPressed: String(mark === "shown")}, name) : name;
  const note = mark ? element("small", {}, " " + mark) : "";
  const wrong = score?.wrong
    ? element("span", {className: "bad"}, ` ${score.wrong} requests WRONG`) : "";
  return element("th", {scope: "row"}, title, note, wrong);
}

function scoreCells(score, bars) {
  if (!score) {
    const words = score === undefined ? "computing …" : "no request fits into its memory";
    return [element("td", {colSpan: 7, className: "soft"}, words)];
  }
  return Object.entries(SCORES).map(([figure, [, text]]) => {
    const share = bars[figure] ? 100 * score[figure] / bars[figure] : null;
    const style = share === null ? "" : `--share: ${share}%`;
    const content = [text(score[figure])].flat();   // memory has two parts
    return element("td", {data: {score: figure}, style}, ...content);
  });
}
