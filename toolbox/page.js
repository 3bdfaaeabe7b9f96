// Draws the runs of runs.js. Top to bottom: the state and the address that says it, the panels, the
// controls. Whatever comes from a prompt enters the page as textContent, never as HTML.

const names = [...RUNS.keys()];
const state = {run: names[0], beside: "", clock: "step", tick: 0, slot: null, stop: null, cells: "token"};
let ticks = [];       // of the clock: the steps of the shown runs, or the milliseconds at which they end
let pointed = null;   // the slot under the mouse or the keyboard; state.slot is the one that is held
let views = [];       // for each run that is shown {run, number, panels: {name: element}, now, states}
const inFrame = location.protocol === "about:";   // a notebook's frame has no address of its own
const $ = id => document.getElementById(id);

// --- the state, and the address -------------------------------------------------------------------

const shown = () => [state.run, state.beside].filter(Boolean).map(name => RUNS.get(name));
const valueOf = step => state.clock === "step" ? step.step : step.end;

function setTicks(value) {
  const values = shown().flatMap(run => run.steps.map(valueOf));
  ticks = [...new Set(values)].sort((a, b) => a - b);
  state.tick = Math.max(0, atMost(ticks, value + 1e-6) - 1);
}

function address() {
  const parts = new URLSearchParams({run: state.run});
  const {theme} = document.documentElement.dataset;
  if (state.beside) parts.set("beside", state.beside);
  parts.set(state.clock, ticks[state.tick]);
  if (state.slot) parts.set("slot", state.slot);
  if (state.stop !== null) parts.set("stop", state.stop + 1);
  if (state.cells !== "token") parts.set("cells", state.cells);
  if (theme) parts.set("theme", theme);
  return "#" + parts;
}

function readAddress() {                 // whatever it says: what does not exist is left out
  const parts = new URLSearchParams(location.hash.slice(1)), first = DATA.walk[0]?.show;
  const begin = parts.has("run") ? [parts.get("run"), parts.get("beside")]
    : first ? [first.run, first.beside] : names;
  state.run = RUNS.has(begin[0]) ? begin[0] : names[0];
  state.beside = RUNS.has(begin[1]) ? begin[1] : "";
  state.clock = parts.has("ms") ? "ms" : "step";
  state.cells = ["position", "wide"].includes(parts.get("cells")) ? parts.get("cells") : "token";
  setTheme(["dark", "light"].includes(parts.get("theme")) ? parts.get("theme") : "");
  setTicks(Number(parts.get(state.clock)) || 0);
  state.slot = slotNamed(parts.get("slot")) ? parts.get("slot") : null;
  state.stop = DATA.walk[parts.get("stop") - 1] ? parts.get("stop") - 1 : null;
  build();
}

function go(tick) {                      // to another moment
  tick = Math.max(0, Math.min(ticks.length - 1, tick));
  if (tick === state.tick) return;
  Object.assign(state, {tick, slot: null, stop: null});
  pointed = null;
  render();
}

function change(what) {                  // other runs, or another clock, at the same moment
  const value = ticks[state.tick], {k} = momentOf(RUNS.get(state.run), state.clock, value);
  const step = RUNS.get(state.run).steps[Math.max(k, 0)];
  Object.assign(state, what, {slot: null, stop: null});
  pointed = null;
  setTicks(what.clock ? valueOf(step) : value);
  build();
}

function visit(i) {                      // a stop of the walk
  const {run, beside, step, slot} = DATA.walk[i].show;
  Object.assign(state, {run, beside: beside ?? "", clock: "step", slot: slot ?? null, stop: i});
  pointed = null;
  setTicks(step);
  build();
  document.querySelector(".look")?.scrollIntoView({block: "nearest"});
}

// A slot's name is "view.pass.row.column". Its four numbers, if there is such a slot.
function slotNamed(name) {
  const parts = (name ?? "").split(".").map(Number), run = shown()[parts[0]];
  return parts.length === 4 && run && slotAt(run, ...parts.slice(1)) ? parts : null;
}

// --- words and elements ---------------------------------------------------------------------------

function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag), {style, data, ...others} = properties;
  if (style) node.style.cssText = style;
  Object.assign(node.dataset, data);
  Object.assign(node, others);
  node.append(...children);
  return node;
}

const number = n => n.toLocaleString("en-US");
const ms = x => x.toLocaleString("en-US", {minimumFractionDigits: 1, maximumFractionDigits: 1}) + " ms";
const plural = (n, what) => `${number(n)} ${what}${n === 1 ? "" : what.endsWith("s") ? "es" : "s"}`;
const percent = (n, of, what) => of ? `${Math.round(100 * n / of)}% of ${what}` : "";
const mean = values => values.reduce((a, b) => a + b, 0) / values.length;
const largest = values => values.reduce((a, b) => Math.max(a, b), 0);
const soft = text => element("p", {className: "soft"}, text);
const bold = text => element("b", {}, text);
const part = (kind, share, properties) => element(
  "span", {className: kind, style: `width: ${100 * share}%`, ...properties});

// --- the panels -----------------------------------------------------------------------------------

const PANELS = {timeline: "Timeline", plan: "Plan of this step", tensor: "Tensor", sees: "Who sees whom",
                bill: "Bill so far", memory: "Memory", requests: "Requests"};

function build() {                       // everything anew: other runs, another width or theme
  const main = $("views");
  views = shown().map((run, number) => ({run, number, panels: {}, rows: new Map()}));
  main.className = views.length === 2 ? "two" : "one";
  main.replaceChildren();
  for (const [name, title] of Object.entries(PANELS)) {
    for (const view of views) {
      const heading = element("h2", {}, title);
      if (views.length === 2) heading.append(element("small", {}, " · " + view.run.name));
      view.panels[name] = element("div");
      main.append(element("section", {className: "panel " + name, style: `--area: ${name}`,
                                      ariaLabel: `${title}, ${view.run.name}`}, heading, view.panels[name]));
    }
  }
  views.forEach(drawTimeline);
  render();
}

function render() {                      // what depends on the moment
  for (const view of views) {
    view.now = momentOf(view.run, state.clock, ticks[state.tick]);
    view.states = view.run.requests.map(request => stateOf(view.run, request, view.now));
    for (const draw of [moveCursor, drawPlan, drawTensor, drawBill, drawRequests, drawMemory]) draw(view);
  }
  drawPointed();
  drawControls();
  if (!inFrame) history.replaceState(null, "", address());
}

// What the run was, and whether it was right.
function verdicts({idea, knobs, place, check, xray}) {
  const line = (name, unknown, wrong, ...text) => element(
    "p", {className: unknown ? "soft" : wrong ? "bad" : "fine"}, bold(name + ": "), ...text);
  const details = Object.entries(check.wrong ?? {}).map(([name, detail]) => ` WRONG: ${name}: ${detail}.`);
  const set = Object.entries(knobs).filter(([, value]) => value !== null).map(entry => entry.join(" "));
  return [element("p", {}, idea), soft([...set, place].join(", ")),
          line("Check", !check.wrong, details.length, check.summary, ...details),
          line("X-ray", xray.left_out, xray.wrong, xray.left_out ? `left out: ${xray.left_out}`
            : xray.wrong ? `${plural(xray.wrong, "time")} a token saw what it must not: ${xray.sentences.join("; ")} …`
            : "every token saw its own request up to itself, and nothing else")];
}

// The timeline: a row for each request and a column for each step, as in the repository's pictures.

const BAND = 36, AXIS = 16;              // pixels: the slots of each step, and the numbers below

function inkOf(name) {                   // a colour of page.css as the theme resolves it
  const probe = document.body.appendChild(element("span", {style: `color: var(--${name})`}));
  const {color} = getComputedStyle(probe);
  probe.remove();
  return color;
}

function hatching(pen, color, ...directions) {
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

function painter(pen) {                  // paint(kind, x, y, width, height)
  const fills = {prefill: [inkOf("prefill")], decode: [inkOf("decode")], recomputed: [inkOf("recomputed")],
                 pad: [inkOf("blank"), hatching(pen, inkOf("stripe"), true)],
                 finished: [inkOf("finished"), hatching(pen, "#ffffffb0", true, false)]};
  return (kind, x, y, width, height) => {
    for (const fill of fills[kind]) {
      pen.fillStyle = fill;
      pen.fillRect(x, y, width, height);
    }
    pen.fillStyle = kind === "decode" ? "#ffffffb0" : "#000000aa";   // marks for a grey print
    if (kind === "decode" && height > 5) pen.fillRect(x, y + height - 3, width, 1);
    if (kind === "recomputed" && height > 3) pen.fillRect(x + width / 2 - 1, y + height / 2 - 1, 2, 2);
  };
}

function drawTimeline(view) {
  const {run, panels: {timeline}} = view, {passes, requests} = run;
  const high = Math.max(1, Math.min(13, Math.floor(240 / requests.length)));
  const labels = high > 9 ? Math.max(36, 8 + 7 * largest(requests.map(({name}) => Math.min(name.length, 8)))) : 0;
  const canvas = element("canvas", {ariaLabel: `every request in each of ${plural(run.steps.length, "step")}`});
  canvas.setAttribute("role", "img");
  view.cursor = element("div", {className: "cursor"});
  view.box = element("div", {className: "box"}, canvas, view.cursor);
  timeline.replaceChildren(view.box, ...verdicts(run));

  const floor = requests.length * high + 6 + BAND, wide = view.box.clientWidth || 300;
  const ratio = window.devicePixelRatio || 1, pen = canvas.getContext("2d");
  Object.assign(canvas, {width: wide * ratio, height: (floor + AXIS) * ratio});
  canvas.style.height = floor + AXIS + "px";
  pen.scale(ratio, ratio);
  const end = largest(shown().map(({steps}) => valueOf(steps.at(-1)) + (state.clock === "step")));
  const x = value => labels + (wide - labels - 2) * value / end;
  view.valueAt = pixels => end * (pixels - labels) / (wide - labels - 2);
  view.across = step => {                // [left, width] of its column
    const [from, to] = state.clock === "step" ? [step.step, step.step + 1] : [step.start, step.end];
    if (x(to) - x(from) < 3) return [x(from), Math.max(0.6, x(to) - x(from))];
    const left = Math.round(x(from)), width = Math.round(x(to)) - left;   // sharp edges
    return [left, width > 6 ? width - 1 : width];
  };
  const paint = painter(pen), ink = inkOf("ink"), waiting = inkOf("waiting"), thick = high > 4 ? high - 1 : high;
  Object.assign(pen, {font: "11px system-ui, sans-serif", textBaseline: "middle"});

  requests.forEach((request, r) => {
    let since = x(state.clock === "step" ? request.arrival : request.arrived);
    pen.fillStyle = ink;
    if (labels) pen.fillText(request.name.slice(0, 8), 0, (r + 0.5) * high);
    for (const [pass, first, n, reached, step] of request.work) {
      const [left, width] = view.across(run.stepOf.get(step)), shape = passes.shape[pass];
      pen.fillStyle = waiting;
      if (left > since) pen.fillRect(since, (r + 0.5) * high - 0.5, left - since, 1);
      since = left + width;
      // Its row in the tensor, if it has one of its own: tokens above, pads below.
      const inPass = passes.work[pass].length / 3 + (passes.finished[pass]?.length ?? 0);
      const again = Math.max(0, Math.min(reached, first + n) - first), slots = shape.length === 2 && shape[0] === inPass ? shape[1] : n;
      let y = r * high;
      for (const [kind, count] of [["recomputed", again],
          [first + again < request.prompt.length ? "prefill" : "decode", n - again], ["pad", slots - n]]) {
        if (count) paint(kind, left, y, width, thick * count / slots);
        y += thick * count / slots;
      }
    }
  });
  const most = largest(shown().flatMap(other => other.steps.map(step => inStep(other, "slots", step))));
  for (const step of run.steps) {
    const [left, width] = view.across(step);
    for (const pass of step.passes) {
      for (const r of passes.finished[pass] ?? []) paint("finished", left, r * high, width, thick);
    }
    let y = floor;
    for (const [kind, name] of [["decode", "useful"], ["recomputed", "recomputed"], ["pad", "pad_slots"],
                                ["finished", "finished_slots"]]) {
      const height = BAND * inStep(run, name, step) / most;
      y -= height;
      if (height) paint(kind, left, y, width, height);
    }
  }
  pen.fillStyle = inkOf("soft");
  if (labels) pen.fillText("slots", 0, floor - BAND / 2);
  pen.fillRect(labels, floor, wide - labels, 1);
  const least = 60 * end / (wide - labels), power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  const unit = [1, 2, 5, 10].map(factor => factor * power).find(unit => unit >= least);
  for (let value = 0; value < end; value += unit) {
    pen.fillRect(x(value), floor, 1, 4);
    pen.fillText(number(value) + (value ? "" : state.clock === "step" ? " steps" : " ms"), x(value) + 3, floor + 10);
  }
}

function moveCursor({run, now, cursor, across}) {
  const step = run.steps[Math.max(now.k, 0)], [left, width] = across(step);
  cursor.style.left = (now.passes.length ? left : left + width) - 2 + "px";
  cursor.style.width = (now.passes.length ? width : 0) + 4 + "px";
}

// The plan: the token budget as a bar. Decodes come first, then chunks of prompts.

function drawPlan({run, now, panels: {plan}}) {
  const budget = run.knobs.token_budget, scale = Math.max(budget ?? 0, run.mostTokens);
  const bar = element("div", {className: "bar"}), chunks = [], pixels = plan.clientWidth / scale;
  let tokens = 0, decodes = 0;
  for (const pass of now.passes) {
    for (const [r, first, n] of threes(run.passes.work[pass])) {
      const {name, prompt, work} = run.requests[r];
      const kind = first < last(work, pass)[3] ? "recomputed" : first < prompt.length ? "prefill" : "decode";
      const title = `${name}: ${plural(n, "token")}, ${DATA.names[kind]}`;
      tokens += n;
      if (kind === "decode") decodes++; else chunks.push(`${name} (${n})`);
      const label = `${name}: ${n}`, textContent = n * pixels > 8 * label.length ? label : "";
      bar.append(part(kind, n / scale, {title, textContent}));
    }
  }
  const prefills = chunks.length && "prefill of " + chunks.slice(0, 8).join(", ") + (chunks.length > 8 ? ", …" : "");
  const items = [decodes && plural(decodes, "decode"), prefills].filter(Boolean).join(", then ");
  const of = budget ? `${tokens} of ${plural(budget, "token")}, the token budget` : `${plural(tokens, "token")}, without a budget`;
  plan.replaceChildren(bar, element("p", {}, now.passes.length ? `${of}: ${items}.` : nothing(now)));
}

const nothing = now => now.over ? "This run is over: all its requests are done."
  : "Nothing is computed: no request has arrived.";

// The tensor: every slot of every pass of the step, in its true shape.

function drawTensor(view) {
  const {run, now, panels: {tensor}} = view, p = run.passes;
  view.slots = new Map();                // a slot's name -> its element
  const parts = now.passes.map((pass, k) => {
    const counts = [["useful", "useful"], ["recomputed", "computed again"], ["pad_slots", "pads"],
                    ["finished_slots", "finished"]].filter(([name]) => p[name] && p[name][pass]);
    const text = `${now.passes.length > 1 ? `, pass ${k + 1} of ${now.passes.length}` : ""}: ${plural(p.slots[pass], "slot")}, `
      + counts.map(([name, what]) => `${number(p[name][pass])} ${what}`).join(", ") + `; ${ms(p.ms[pass])}`;
    const shape = `(${p.shape[pass].join(", ")}${p.shape[pass].length === 1 ? "," : ""})`;
    return element("div", {className: "pass", data: {pass}}, element("p", {}, bold("shape " + shape), text),
                   element("div", {className: "scroll"}, gridOf(view, pass)));
  });
  // Room for the tallest step, so that the panels below stay where they are.
  run.tallest ??= largest(run.steps.map(step => step.passes.reduce((total, pass) => total + 40
    + (p.shape[pass].length === 1 ? 45 : p.rows[pass].length * (highOf(p, pass) + 1)), 0)));
  tensor.style.minHeight = Math.min(run.tallest, 420) + "px";
  tensor.replaceChildren(...parts.length ? parts : [soft(nothing(now))]);
}

const highOf = (p, pass) => p.rows[pass].length > 16 ? 13 : 22;   // pixels

function gridOf({run, number, slots, panels}, pass) {
  const p = run.passes, rows = p.rows[pass], width = p.shape[pass].at(-1), flat = p.shape[pass].length === 1;
  const nameOf = row => ownersOf(row).map(owner => run.requests[owner].name).join(" ");
  const labels = flat ? 0 : 4 + 8 * largest(rows.map(row => Math.min(8, nameOf(row).length)));
  // As wide as fits, so that no slot is out of sight; under 5 pixels, without gaps between them.
  const fits = (panels.tensor.clientWidth - 6 - labels) / width, gap = fits < 5 ? 0 : 1;
  const cell = state.cells === "wide" ? 64 : Math.max(2, Math.min(64, gap ? Math.floor(fits) - 1 : fits));
  const grid = element("div", {
    className: "grid", tabIndex: 0, data: {pass, view: number},
    ariaLabel: "Slots; the arrow keys move from one to the next",
    style: `--high: ${highOf(p, pass)}px; column-gap: ${gap}px; grid-template-columns: ${flat ? "" : labels + "px "}repeat(${width}, ${cell}px)`});
  grid.setAttribute("role", "application");
  for (const owner of flat ? ownersOf(rows[0]) : []) {   // the stream's boundaries
    const n = rows[0].reduce((sum, run) => sum + (run[0] === owner ? run[2] : 0), 0);
    const {name} = run.requests[owner], textContent = n * cell > 9 * name.length ? name : "";
    grid.append(element("span", {className: "name above", title: name, textContent, style: `grid-column: span ${n}`}));
  }
  rows.forEach((row, b) => {
    if (!flat) grid.append(element("span", {className: "name", title: nameOf(row)}, nameOf(row)));
    let column = 0;
    for (const [owner, first, n] of row) {
      for (let k = 0; k < n; k++) {
        const name = [number, pass, b, column++].join("."), kind = kindOf(run, pass, owner, first + k);
        const textContent = owner >= 0 && cell > 16 ? word(run, owner, first + k, state.cells) : "";
        slots.set(name, element("i", {className: "slot " + kind, textContent, data: {slot: name}}));
        grid.append(slots.get(name));
      }
    }
  });
  return grid;
}

// Who sees whom: the keys of the slot that is pointed at, or held, and where they are.

function drawPointed() {
  const name = pointed ?? state.slot, picked = slotNamed(name);
  for (const view of views) {
    for (const node of view.lit ?? []) node.classList.remove("lit", "picked", "wrong");
    view.lit = [];
    const {run, number, panels: {sees}} = view, [owner, pass, row] = picked ?? [];
    if (run.xray.left_out) sees.replaceChildren(soft(`Not measured in this run: ${run.xray.left_out}.`));
    else if (owner === number && view.now.passes.includes(pass)) {
      const slot = slotAt(run, ...picked.slice(1)), keys = markedKeys(run, pass, row, slot);
      sees.replaceChildren(sentence(run, slot, keys), strip(run, pass, slot, keys));
      lightUp(view, name, picked, keys);
    } else {
      sees.replaceChildren(soft("Point at a slot of the tensor to see which keys it sees. A click or a tap holds it."));
    }
  }
}

function sentence(run, slot, keys) {
  const count = (mark, pad = false) => keys.filter(key => key.mark === mark && key.owner < 0 === pad).length;
  const who = slot.owner === -1 ? "A pad" : slot.owner < -1 ? `A slot of ${run.requests[-2 - slot.owner].name}, which is finished,`
    : `${run.requests[slot.owner].name}, position ${slot.position}, “${word(run, slot.owner, slot.position)}” (${DATA.names[slot.kind]})`;
  const pads = count("wrong", true) + count("past", true) + count("new", true);
  const all = count("past") + count("new") + count("wrong") + pads;
  const faults = slot.owner < 0 ? [] : [
    pads && `it sees ${plural(pads, "pad")}`, count("wrong") && `it sees ${plural(count("wrong"), "key")} that is not its own`,
    count("missing") && `it does not see ${plural(count("missing"), "key")} of its own`,
    slot.shift && `it is computed as if at position ${slot.position + slot.shift}`].filter(Boolean);
  return element("p", {}, bold(who), ` sees ${plural(all, "key")}: ${count("past")} past, ${count("new")} new, ${plural(pads, "pad")}.`
    + (slot.owner < 0 ? " What it computes is never read." : ""),
    element("span", {className: "bad"}, faults.length ? ` Wrong: ${faults.join(", ")}.` : ""));
}

function strip(run, pass, slot, keys) {  // all keys of its row, in order
  const table = run.pool && slot.owner >= 0 && last(run.requests[slot.owner].rooms, pass)?.[1];
  const node = element("div", {className: "keys scroll", tabIndex: 0});
  let before = "";
  for (const key of keys) {
    const where = !key.past ? "new" : table ? `page ${table[Math.floor(key.position / run.pool.page_size)]}` : "past";
    const who = key.owner < 0 ? "pad" : `${run.requests[key.owner].name}, position ${key.position}`;
    if (where !== before) node.append(bold(where));
    before = where;
    node.append(element("i", {className: key.mark, title: `${who}: ${key.mark}`,
                              textContent: key.owner < 0 ? "·" : word(run, key.owner, key.position, state.cells)}));
  }
  return node;
}

function lightUp(view, name, [number, pass, row], keys) {
  const {run, slots, lit, panels: {memory}} = view;
  const light = (node, ...classes) => { if (node) { node.classList.add(...classes); lit.push(node); } };
  light(slots.get(name), "picked");
  for (const {owner, position, column, past, mark} of keys) {
    if (mark === "wrong" && !past) light(slots.get([number, pass, row, column].join(".")), "lit", "wrong");
    if (mark === "new") light(slots.get([number, pass, row, column].join(".")), "lit");
    if (mark !== "past") continue;
    const room = last(run.requests[owner].rooms, pass)?.[1];
    light(memory.querySelector(`[data-holder="${owner}"]`), "lit");
    if (Array.isArray(room)) {
      light(memory.querySelector(`[data-page="${room[Math.floor(position / run.pool.page_size)]}"]`), "lit");
    }
  }
}

// Requests: how far each one is, and its text so far. Of many, only those under way are listed.

const MANY = 40, ORDER = {absent: "not arrived", waiting: "waiting", prefill: "prefilling", decode: "decoding",
                          recomputed: "computed again", preempted: "preempted", done: "done"};

function drawRequests(view) {
  const {run, states, rows, panels: {requests}} = view, few = run.requests.length <= MANY;
  const counts = Object.entries(ORDER).map(([kind, word]) => [states.filter(is => is.kind === kind).length, word]);
  const line = counts.filter(([n]) => n).map(([n, word]) => `${n} ${word}`).join(", ");
  const listed = run.requests.flatMap((request, r) => {
    if (!few && ["absent", "waiting", "done"].includes(states[r].kind)) return [];
    if (!rows.has(r)) rows.set(r, requestRow(request));
    fillRow(rows.get(r), request, states[r]);
    return [rows.get(r).node];
  });
  view.list ??= requests.appendChild(element("p")) && requests.appendChild(element("div", {className: "scroll", tabIndex: 0}));
  requests.firstChild.textContent = line + (few ? "." : ". Only those under way are listed.");
  if (listed.length !== view.list.children.length || listed.some((node, i) => node !== view.list.children[i])) {
    view.list.replaceChildren(...listed);
  }
}

function requestRow(request) {
  const state = element("span", {className: "state"}), waits = element("span", {className: "waits"});
  const prompt = element("span", {className: "prompt"}), answer = element("span", {className: "answer"});
  const text = element("button", {className: "text", title: "all of the text, or its end", dir: "auto"}, prompt, answer);
  const node = element("div", {className: "request", data: {request: request.name}},
    element("div", {}, bold(request.name), state, waits), text);
  const row = {node, state, prompt, answer, waits, texts: [textOf(request.prompt), ""]};
  text.onclick = () => {
    node.classList.toggle("open");
    fillTexts(row);
  };
  return row;
}

function fillTexts({node, prompt, answer, texts}) {   // all of it, or its end
  const tail = (text, n) => [...text].length > n ? "…" + [...text].slice(-n).join("") : text;
  const open = node.classList.contains("open"), end = open ? texts[1] : tail(texts[1], 150);
  prompt.textContent = (open ? texts[0] : tail(texts[0], Math.max(20, 150 - end.length))) + " ▸ ";
  answer.textContent = end;
}

function fillRow(row, request, {words, active, tokens}) {
  const said = [words, active, tokens].join();
  if (said === row.said) return;
  row.said = said;
  const gaps = gapsOf(request, tokens), first = request.steps[0] - request.arrival + 1;
  row.node.classList.toggle("running", active);
  row.state.textContent = words;
  row.texts[1] = textOf(request.generated.slice(0, tokens));
  fillTexts(row);
  row.waits.textContent = !tokens ? `prompt of ${plural(request.prompt.length, "token")}`
    : `${plural(tokens, "token")} · TTFT ${plural(first, "step")}, ${ms(request.ms[0] - request.arrived)}`
      + (gaps.length ? `\nITL mean ${ms(mean(gaps))}, longest ${ms(largest(gaps))}` : "");
}

const gapsOf = (request, tokens) => request.ms.slice(1, Math.max(tokens, 1)).map((time, i) => time - request.ms[i]);

// Memory: each request's cache within its room; in the paged stage the pool and the block tables.

function drawMemory(view) {
  const {run, now, states, panels: {memory}} = view;
  const holders = run.requests.map((request, r) => ({...states[r], r, name: request.name}))
    .filter(({holds, kind}) => holds !== null && !(kind === "done" && now.over));
  const lines = Math.min(run.knobs.max_batch ?? 1, run.requests.length);   // the most holders
  memory.style.minHeight = `${2.5 + 1.4 * lines}rem`;
  memory.replaceChildren(...!run.requests.some(request => request.rooms.length)
    ? [soft("This run keeps no keys and values: every step computes all tokens again.")]
    : run.pool ? poolOf(view, holders) : cachesOf(run, now, holders));
}

function cachesOf(run, now, holders) {
  run.largest ??= largest(run.requests.flatMap(request => request.rooms.map(([, room]) => room ?? 0)));
  const limit = run.knobs.max_kv_tokens, columns = run.passes.columns[now.pass] ?? 0;
  const rows = holders.map(({r, name, computed, holds}) => {
    const pads = Math.max(0, columns - computed);      // of a static batch, whose rows share one cache
    const bar = element("div", {className: "bar", style: `width: ${100 * holds / run.largest}%`},
                        part("past", computed / holds), ...pads ? [part("pad", pads / holds)] : []);
    const title = `${plural(computed, "token")}` + (pads ? `, ${pads} columns of pads and of finished slots` : "");
    return element("div", {className: "holder", title, data: {holder: r}}, bold(name), bar, `${computed} of ${holds}`);
  });
  const used = holders.reduce((sum, {computed}) => sum + computed, 0);
  const room = holders.reduce((sum, {holds}) => sum + holds, 0);
  const whole = limit ? [element("div", {className: "bar"}, part("past", used / limit), part("room", (room - used) / limit))] : [];
  return [element("p", {}, `${plural(used, "token")} in caches with room for ${number(room)}`
    + (limit ? `; at most ${number(limit)} may be reserved.` : "; no limit was set.")), ...whole, element("div", {className: "scroll"}, ...rows)];
}

function poolOf(view, holders) {
  const {run, now} = view, {pages, page_size: size} = run.pool, tiny = pages > 160;
  const owners = Array.from({length: pages}, () => []), filled = Array(pages).fill(0);
  const kept = new Set(last(run.kept, now.pass)?.[1] ?? []), counts = {held: 0, shared: 0, kept: 0, free: 0};
  for (const {name, holds, computed} of holders) {
    holds.forEach((page, i) => {
      owners[page].push(name);
      filled[page] = Math.max(filled[page], Math.min(size, computed - i * size));
    });
  }
  view.pages ??= owners.map((_, page) => element("div", {data: {page}}));
  owners.forEach((by, page) => {
    const kind = by.length > 1 ? "shared" : by.length ? "held" : kept.has(page) ? "kept" : "free";
    const said = `page ${page}, ${kind}: ${by.join(", ")} ${filled[page]}/${size}`, cell = view.pages[page];
    counts[kind]++;
    if (cell.title === said) return;     // most pages stay as they are from step to step
    const who = by.length ? by[0] + (by.length > 1 ? ` +${by.length - 1}` : "") : kind === "kept" ? "kept" : "";
    Object.assign(cell, {title: said, className: `page ${kind}${tiny ? " tiny" : ""}`});
    cell.replaceChildren(...tiny ? [] : [element("small", {}, String(page)), who],
                         element("u", {style: `width: ${100 * filled[page] / size}%`}));
  });
  const tables = holders.map(({r, name, holds}) => element(
    "div", {className: "holder table", data: {holder: r}}, bold(name), element("span", {}, holds.join(" "))));
  view.pool ??= element("div", {className: "pool" + (tiny ? " tiny" : "")}, ...view.pages);
  return [element("p", {}, `${counts.held + counts.shared} of ${plural(pages, "page")} held, ${counts.shared} of them shared; `
      + `${counts.kept} kept for later; ${plural(size, "token")} in a page.`), view.pool,
    element("p", {}, bold("Block tables"), ": a request's pages in the order of its tokens"),
    element("div", {className: "scroll"}, ...tables)];
}

// The bill: sums over all passes so far.

function drawBill({run, now, states, panels: {bill}}) {
  const total = name => now.pass < 0 ? 0 : run.totals[name][now.pass], slots = total("slots");
  const begun = run.requests.filter((_, r) => states[r].tokens);
  const gaps = atMost(run.gaps, now.step, ([step]) => step), [, , sum, longest] = run.gaps[gaps - 1] ?? [];
  const ofSlots = name => [number(total(name)), percent(total(name), slots, "slots")];
  const rows = {
    passes: ["forward passes", number(now.pass + 1)],
    generated: ["generated tokens", number(states.reduce((sum, is) => sum + is.tokens, 0))],
    slots: ["slots", number(slots)], useful: ["useful tokens", ...ofSlots("useful")],
    pad_slots: ["pads", ...ofSlots("pad_slots")], finished_slots: ["finished", ...ofSlots("finished_slots")],
    recomputed: ["computed again", ...ofSlots("recomputed")],
    score_entries: ["scores, a head and layer", number(total("score_entries"))],
    useful_scores: ["useful scores", number(total("useful_scores")), percent(total("useful_scores"), total("score_entries"), "scores")],
    padded_keys: ["padded keys", number(total("padded_keys"))],
    copied_bytes: ["copied keys and values", (total("copied_bytes") / 1e6).toFixed(1) + " MB"],
    ms: ["time in passes", ms(total("ms"))],
    ttft: ["TTFT, mean", begun.length ? ms(mean(begun.map(request => request.ms[0] - request.arrived))) : "–", plural(begun.length, "request")],
    itl: ["ITL, mean", gaps ? ms(sum / gaps) : "–"], stall: ["ITL, longest", gaps ? ms(longest) : "–"]};
  bill.replaceChildren(element("table", {}, ...Object.entries(rows).map(([figure, [name, value, note = ""]]) => element(
    "tr", {}, element("th", {scope: "row"}, name), element("td", {data: {figure}}, value), element("td", {className: "soft"}, note)))));
}

// --- controls -------------------------------------------------------------------------------------

let timer = null;                        // while it plays

function drawControls() {
  for (const id of ["run", "beside", "clock", "cells"]) $(id).value = state[id];
  const value = ticks[state.tick], end = ticks.at(-1), stop = DATA.walk[state.stop];
  $("now").textContent = state.clock === "step" ? `step ${value} of ${end}` : `${ms(value)} of ${ms(end)}`;
  for (const node of document.querySelectorAll(".look")) node.classList.remove("look");
  $("walk").querySelectorAll("button").forEach((button, i) => button.ariaCurrent = i === state.stop ? "step" : null);
  $("stop").hidden = !DATA.walk.length;
  $("stop").className = stop ? "on" : "";
  $("stop").textContent = "New to batching? The guided walk above has a few stops.";
  if (!stop) return;
  const [panel, number] = stop.look, {panels, run} = views[number];
  $("stop").textContent = `${stop.text} Look at: ${PANELS[panel]}, ${run.name}.`;
  panels[panel].parentNode.classList.add("look");
}

function play(on) {
  clearInterval(timer);
  timer = on ? setInterval(() => state.tick < ticks.length - 1 ? go(state.tick + 1) : play(false),
                           1000 / $("speed").value) : null;
  $("play").textContent = on ? "pause" : "play";
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.documentElement.style.colorScheme = theme || "light dark";
}

function turnTheme() {
  const dark = document.documentElement.dataset.theme === "dark" || (
    !document.documentElement.dataset.theme && matchMedia("(prefers-color-scheme: dark)").matches);
  setTheme(dark ? "light" : "dark");
  build();
}

function faster(by) {
  const {options, selectedIndex} = $("speed");
  $("speed").selectedIndex = Math.max(0, Math.min(options.length - 1, selectedIndex + by));
  if (timer) play(true);
}

const hold = name => { state.slot = name && state.slot !== name ? name : null; render(); };
const KEYS = {
  ArrowLeft: far => go(state.tick - far), ArrowRight: far => go(state.tick + far), Home: () => go(0),
  End: () => go(ticks.length - 1), "+": () => faster(1), "-": () => faster(-1),
  " ": () => play(!timer), Escape: () => { pointed = null; hold(null); }};
const MOVES = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};

function onKey(event) {
  const {target, key} = event, grid = target.closest(".grid"), {activeElement} = document;
  if (target.closest("select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (key === " " && target.closest("button, summary")) return;
  if (grid && MOVES[key]) {
    const here = slotNamed(pointed ?? state.slot), [view, pass] = [Number(grid.dataset.view), Number(grid.dataset.pass)];
    const [row, column] = here && here[0] === view && here[1] === pass
      ? [here[2] + MOVES[key][0], here[3] + MOVES[key][1]] : [0, 0];
    const name = [view, pass, row, column].join(".");
    if (views[view].slots.has(name)) { pointed = name; drawPointed(); }
  } else if (grid && key === "Enter") {
    const {view, pass} = grid.dataset;
    hold(pointed);
    document.querySelector(`.grid[data-view="${view}"][data-pass="${pass}"]`)?.focus();
  } else if (KEYS[key]) {
    KEYS[key](event.shiftKey ? 10 : 1);
    if (activeElement !== document.body && !activeElement.isConnected) $("play").focus();
  } else return;
  event.preventDefault();
}

function seek(event) {                   // a press or a drag on the timeline
  const view = views.find(view => view.box.contains(event.target));
  if (!view || (event.type === "pointermove" && !event.buttons)) return;
  const value = view.valueAt(event.clientX - view.box.getBoundingClientRect().left);
  go(atMost(ticks, value) - (state.clock === "step"));
}

function begin() {
  const {requests} = DATA.runs[0], tokens = requests.reduce((sum, request) => sum + request.prompt.length, 0);
  $("about").textContent = `${plural(requests.length, "request")}, ${plural(tokens, "prompt token")}`;
  $("run").append(...names.map(name => element("option", {value: name}, name)));
  $("beside").append(...["", ...names].map(name => element("option", {value: name}, name || "nothing")));
  $("stages").hidden = names.length === 1;
  $("walk").hidden = !DATA.walk.length;
  $("walk").querySelector("ol").append(...DATA.walk.map(({title}, i) => element(
    "li", {}, element("button", {onclick: () => visit(i)}, `${i + 1} ${title}`))));
  const legend = [...Object.entries(DATA.names), ["wrong", "seen, and must not be"]];
  $("legend").append(...legend.map(([kind, name]) => element("span", {}, element("i", {className: kind}), name)));

  for (const id of ["run", "beside", "clock"]) $(id).onchange = () => change({[id]: $(id).value});
  $("cells").onchange = () => { state.cells = $("cells").value; render(); };
  $("speed").onchange = () => timer && play(true);
  $("theme").onclick = turnTheme;
  $("first").onclick = () => go(0);
  $("back").onclick = () => go(state.tick - 1);
  $("next").onclick = () => go(state.tick + 1);
  $("last").onclick = () => go(ticks.length - 1);
  $("play").onclick = () => play(!timer);
  document.addEventListener("keydown", onKey);

  const main = $("views"), slotOf = event => event.target.dataset.slot ?? null;
  main.addEventListener("pointerover", event => {
    if (event.pointerType === "touch" || slotOf(event) === pointed) return;
    pointed = slotOf(event);
    drawPointed();
  });
  main.addEventListener("mousedown", event => slotOf(event) && event.preventDefault());   // keeps the focus
  main.addEventListener("click", event => slotOf(event) && hold(slotOf(event)));
  main.addEventListener("pointerdown", seek);
  main.addEventListener("pointermove", seek);
  let wide = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== wide) { wide = innerWidth; build(); } });
  addEventListener("hashchange", () => { if (location.hash !== address()) readAddress(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
  readAddress();
}

begin();
