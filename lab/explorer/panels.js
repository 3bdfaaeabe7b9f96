// Draws the panels of one run at one moment, recorded or computed: `view` is {run, number, now,
// panels: {name: element}, states, ...}, see build() in page.js. Whatever comes from a prompt
// enters the page as textContent, never as HTML.

// --- words and elements --------------------------------------------------------------------------

function element(tag, properties = {}, ...children) {
  const node = document.createElement(tag), {style, data, ...others} = properties;
  if (style) node.style.cssText = style;
  Object.assign(node.dataset, data);
  Object.assign(node, others);
  node.append(...children);
  return node;
}

const whole = new Intl.NumberFormat("en-US"), number = n => whole.format(n);
const tenth = new Intl.NumberFormat("en-US", {minimumFractionDigits: 1, maximumFractionDigits: 1});
const ms = x => tenth.format(x) + " ms";
const plural = (n, what) => `${number(n)} ${what}${n === 1 ? "" : what.endsWith("s") ? "es" : "s"}`;
const percent = (n, of, what) => of ? `${Math.round(100 * n / of)}% of ${what}` : "";
const mean = values => values.reduce((a, b) => a + b, 0) / values.length;
const soft = text => element("p", {className: "soft"}, text);
const bold = text => element("b", {}, text);
const div = (className, ...children) => element("div", {className}, ...children);
const part = (kind, share, properties) => element(
  "span", {className: kind, style: `width: ${100 * share}%`, ...properties});

// What the run was, and whether it was right.
function verdicts({idea, knobs, place, check, xray}) {
  const line = (name, unknown, wrong, ...text) => element(
    "p", {className: unknown ? "soft" : wrong ? "bad" : "fine"}, bold(name + ": "), ...text);
  const details = Object.entries(check.wrong ?? {}).map(
    ([name, detail]) => ` WRONG: ${name}: ${detail}.`);
  const set = Object.entries(knobs).filter(([, value]) => value !== null).map(
    entry => entry.join(" "));
  return [element("p", {}, idea), soft([...set, place].join(", ")),
          line("Check", !check.wrong, details.length, check.summary, ...details),
          line("X-ray", xray.left_out, xray.wrong, xray.left_out ? `left out: ${xray.left_out}`
            : xray.wrong ? `${plural(xray.wrong, "time")} a token saw what it must not: `
              + `${xray.sentences.join("; ")} …`
            : "every token saw its own request up to itself, and nothing else")];
}

// The timeline: a row for each request and a column for each step, as in the repository's pictures.

const BAND = 24, AXIS = 16;              // pixels: the slots of each step, and the numbers below

const INKS = ["prefill", "decode", "recomputed", "finished", "blank", "stripe", "ink", "soft",
              "waiting", "alarm"];

function inks(canvas) {                  // colours of page.css, as the theme resolves them
  return Object.fromEntries(INKS.map(name => {
    canvas.style.color = `var(--${name})`;
    return [name, getComputedStyle(canvas).color];
  }));
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
    pen.fillStyle = kind === "decode" ? "#ffffffb0" : "#000000aa";   // marks for a grey print
    if (kind === "decode" && height > 5) pen.fillRect(x, y + height - 3, width, 1);
    if (kind === "recomputed" && height > 3 && width > 3) {
      pen.fillRect(x + width / 2 - 1, y + height / 2 - 1, 2, 2);
    }
  };
}

// view.high: pixels of a row, if it is given; view.bare: the names stand beside it.
function drawTimeline(view) {
  const {run, panels: {timeline}} = view, {requests} = run;
  const wide = timeline.clientWidth || 300;   // asked before anything changes: else it takes long
  const high = view.high ?? Math.max(1, Math.min(13, Math.floor(240 / requests.length)));
  const letters = Math.min(8, largest(requests.map(({name}) => name.length)));
  const named = high > 8 && !view.bare;
  const labels = named || (state.own && !view.bare) ? Math.max(36, 8 + 7 * letters) : 0;   // pixels
  const canvas = element("canvas", {
    ariaLabel: `${run.name}: every request in each of ${plural(run.steps.length, "step")}`});
  canvas.setAttribute("role", "img");
  view.cursor = element("div", {className: "cursor"});
  view.box = element("div", {className: "box"}, canvas, view.cursor);
  const onTime = state.clock === "ms", [first, next] = longWaits(run, timeline);
  const say = ({longest, shaded}, text, mark) => element("span", {
    className: longest > shaded ? "longest" : ""}, text, ms(longest), longest > shaded ? mark : "");
  timeline.replaceChildren(
    view.box,
    ...onTime && run.waits.length ? [element("p", {},
                         say(first, "Longest wait for a first token: ", " (red line)"),
                         say(next, "; for a next one: ", " (red frames)"), ".")] : [],
    ...run.check ? [div("verdicts", ...verdicts(run))] : []);

  const floor = requests.length * high + 6 + BAND;
  const ratio = window.devicePixelRatio || 1, pen = canvas.getContext("2d");
  Object.assign(canvas, {width: wide * ratio, height: (floor + AXIS) * ratio});
  canvas.style.height = floor + AXIS + "px";
  pen.scale(ratio, ratio);
  Object.assign(pen, {font: "11px system-ui, sans-serif", textBaseline: "middle"});
  const end = state.held ?? largest(shown().map(endOf));
  const x = value => labels + (wide - labels - 2) * Math.max(0, value) / end;
  const span = (from, to) => {           // [left, width]
    if (x(to) - x(from) < 3) return [x(from), Math.max(0.6, x(to) - x(from))];
    const left = Math.round(x(from)), width = Math.round(x(to)) - left;   // sharp edges
    return [left, width > 6 ? width - 1 : width];
  };
  const ink = inks(canvas), {passes} = run;
  Object.assign(view, {
    end, wide, valueAt: pixels => end * (pixels - labels) / (wide - labels - 2),
    across: step => onTime ? span(step.start, step.end) : span(step.step, step.step + 1)});
  const place = {
    pen, paint: painter(pen, ink), ink, x, high, thick: high > 4 ? high - 1 : high, labels, floor,
    named, onTime, first, next, acrossPass: pass => onTime
      ? span(passes.begin[pass], passes.begin[pass] + passes.ms[pass])
      : span(passes.step[pass], passes.step[pass] + 1)};
  requests.forEach((request, r) => drawRow(view, place, request, r));
  drawBand(view, place);
  pen.fillStyle = ink.soft;
  if (labels) pen.fillText("slots", 0, floor - BAND / 2);
  view.drawAxis = covered => drawAxis(place, end, wide, run.base, covered);
  view.drawAxis(null);
}

// How far the axis goes: steps, or milliseconds.
const endOf = ({steps}) => steps.length ? valueOf(steps.at(-1)) + (state.clock === "step") : 1;

// Of waits for a first token, and between two, {longest, shaded: how long those are that are red};
// none is while the walk asks. Red is what is long beside the other run, too.
function longWaits(run, timeline) {
  return [({waits}) => waits, ({gaps}) => gaps.map(([, gap]) => gap)].map(waits => {
    const mine = waits(run), longest = largest(mine), most = largest(shown().flatMap(waits));
    const usual = mine.length ? mean(mine) : 0, asked = timeline.closest(".asking");
    return {longest, shaded: asked ? Infinity : Math.max(0.9 * most, 1.5 * usual)};
  });
}

function drawRow({run, across}, place, request, r) {
  const {pen, paint, ink, x, high, thick, labels, named, onTime, first, next, acrossPass} = place;
  const {shape, finished} = run.passes, middle = (r + 0.5) * high;
  const line = (from, to) => {           // it waits
    pen.fillStyle = ink.waiting;
    pen.fillRect(from, middle - 0.5, Math.max(0, to - from), 1);
  };
  pen.fillStyle = ink.ink;
  if (named) pen.fillText(request.name.slice(0, 8), 0, middle);
  if (request.refused) {
    pen.fillStyle = ink.alarm;
    pen.fillText(`can never run: ${request.refused}`, labels + 4, middle);
    return;
  }
  let since = x(onTime ? request.arrived : request.arrival);
  for (const {pass, n, parts} of request.work) {
    const [left, width] = acrossPass(pass), [B, T] = shape[pass];
    line(since, left);
    since = left + width;
    // Its row in the tensor, if it has one of its own: tokens above, pads below.
    const rows = run.work[pass].length + (finished[pass]?.length ?? 0);
    const slots = T && B === rows ? T : n;
    let y = r * high;
    for (const [kind, count] of [...parts, ["pad", slots - n]]) {
      if (count) paint(kind, left, y, width, thick * count / slots);
      y += thick * count / slots;
    }
  }
  if (!request.reason && run.steps.length) {   // in a live run, it may wait still
    line(since, across(run.steps.at(-1)).reduce((left, width) => left + width));
  }
  Object.assign(pen, {strokeStyle: ink.alarm, lineWidth: 2});
  for (const [i, time] of onTime ? request.ms.entries() : []) {   // all of a long wait
    if (request.ms[i + 1] - time > next.shaded) {
      pen.strokeRect(x(time), r * high, x(request.ms[i + 1]) - x(time), Math.max(thick, 3));
    }
  }
  if (onTime && request.ms[0] - request.arrived > first.shaded) {
    const from = x(request.arrived);
    pen.fillStyle = ink.alarm;
    pen.fillRect(from, r * high + thick - 2, x(request.ms[0]) - from, 2);
  }
}

function drawBand({run, across}, {paint, high, thick, floor, acrossPass}) {   // each step's slots
  const tallest = largest(shown().flatMap(
    other => other.steps.map(step => inStep(other, "slots", step))));
  for (const step of run.steps) {
    const [left, width] = across(step);
    const count = {decode: 0, prefill: 0, recomputed: 0,
                   pad: inStep(run, "pad_slots", step),
                   finished: inStep(run, "finished_slots", step)};
    for (const pass of step.passes) {
      const [from, over] = acrossPass(pass);
      for (const r of run.passes.finished[pass] ?? []) {
        paint("finished", from, r * high, over, thick);
      }
      for (const [kind, n] of run.work[pass].flatMap(({parts}) => parts)) count[kind] += n;
    }
    let y = floor;
    for (const [kind, slots] of Object.entries(count)) {
      const height = BAND * slots / tallest;
      y -= height;
      if (height) paint(kind, left, y, width, height);
    }
  }
}

// covered: [from, to] in pixels, where the cursor's badge stands; no number lies there.
function drawAxis({pen, x, ink, floor, labels}, end, wide, base = 0, covered = null) {
  pen.clearRect(0, floor, wide, AXIS);
  pen.fillStyle = ink.soft;
  pen.fillRect(labels, floor, wide - labels, 1);
  const least = 60 * end / (wide - labels);
  const power = 10 ** Math.floor(Math.log10(Math.max(least, 1)));
  const unit = [1, 2, 5, 10].map(factor => factor * power).find(unit => unit >= least);
  for (let value = Math.ceil(base / unit) * unit - base, i = 0; value < end; value += unit, i++) {
    pen.fillRect(x(value), floor, 1, 4);
    const text = number(base + value) + (i ? "" : state.clock === "step" ? " steps" : " ms");
    const from = x(value) + 3, to = from + pen.measureText(text).width;
    const hidden = covered && from < covered[1] && to > covered[0];
    if (to < wide && !hidden) pen.fillText(text, from, floor + 10);
  }
}

function moveCursor(view) {
  const {run, now, cursor, across, wide} = view;
  cursor.hidden = !run.steps.length;
  if (cursor.hidden) return;
  cursor.dataset.step = `step ${now.step + (run.base ?? 0)}`;
  const step = run.steps[Math.max(now.k, 0)], [left, width] = across(step);
  const from = (now.passes.length ? left : left + width) - 2;
  const over = (now.passes.length ? width : 0) + 4, late = left > wide / 2;
  cursor.style.left = from + "px";
  cursor.style.width = over + "px";
  cursor.classList.toggle("late", late);
  const badge = 10 + 6.5 * cursor.dataset.step.length;   // pixels, about
  view.drawAxis(late ? [from + over - badge, from + over] : [from, from + badge]);
}

// The plan: the token budget as a bar. Decodes come first, then chunks of prompts.

function partsNow({run, now}) {          // [request's name, kind, tokens] of each part of the plan
  return now.passes.flatMap(pass => run.work[pass]).flatMap(
    ({owner, parts}) => parts.map(([kind, n]) => [run.requests[owner].name, kind, n]));
}

function sayPlan({run, now}, parts) {
  if (!now.passes.length) return nothing(now);
  const budget = run.knobs.token_budget, tokens = parts.reduce((sum, [, , n]) => sum + n, 0);
  const of = budget ? `${tokens} of ${plural(budget, "token")}, the token budget`
    : `${plural(tokens, "token")}, without a budget`;
  const list = (which, before, after = "") => {
    const all = parts.filter(([, kind]) => kind === which).map(([name, , n]) => `${name} (${n})`);
    const more = all.length > 8 ? ", …" : "";
    return all.length && before + all.slice(0, 8).join(", ") + more + after;
  };
  const decodes = parts.filter(([, kind]) => kind === "decode").length;
  const items = [decodes && plural(decodes, "decode"), list("prefill", "prefill of "),
                 list("recomputed", "", " computed again")].filter(Boolean);
  return `${of}: ${items.join(", then ")}.${padsSay(run, now)}`;
}

function padsSay({passes}, {passes: those}) {   // where slots are computed for nothing
  const sum = name => those.reduce((all, i) => all + passes[name][i], 0);
  const empty = sum("pad_slots") + sum("finished_slots");
  return empty ? ` ${number(empty)} of its ${plural(sum("slots"), "slot")} ${
    sum("finished_slots") ? "are pads or finished" : "are pads"}.` : "";
}

function drawPlan(view) {
  const {run, panels: {plan}} = view, parts = partsNow(view);
  const scale = Math.max(run.knobs.token_budget ?? 0, run.mostTokens);
  const bar = div("bar", ...parts.map(([name, kind, n]) => {
    const label = `${name}: ${n}`, fits = n * plan.clientWidth / scale > 8 * label.length;
    const title = `${name}: ${plural(n, "token")}, ${DATA.names[kind]}`;
    return part(kind, n / scale, {title, textContent: fits ? label : ""});
  }));
  plan.replaceChildren(bar, element("p", {}, sayPlan(view, parts)));
}

const nothing = now => now.over ? "This run is over: all its requests are done."
  : "Nothing is computed: no request has arrived.";

// The tensor: every slot of every pass of the step, in its true shape.

function drawTensor(view) {
  const {run, now, panels: {tensor}} = view, p = run.passes;
  view.slots = new Map();                // a slot's name -> its element
  const parts = now.passes.map((pass, k) => {
    const counts = [["useful", "useful"], ["recomputed", "computed again"], ["pad_slots", "pads"],
                    ["finished_slots", "finished"]].filter(([name]) => p[name][pass]);
    const which = now.passes.length > 1 ? `, pass ${k + 1} of ${now.passes.length}` : "";
    const clock = DATA.calculated || run.computed ? ", calculated" : "";
    const text = `${which}: ${plural(p.slots[pass], "slot")}, ` + counts.map(
      ([name, what]) => `${number(p[name][pass])} ${what}`).join(", ")
      + `; ${ms(p.ms[pass])}${clock}`;
    const shape = `(${p.shape[pass].join(", ")}${p.shape[pass].length === 1 ? "," : ""})`;
    const grid = run.computed ? barsOf(run, pass) : div("scroll", gridOf(view, pass));
    return element("div", {className: "pass", data: {pass}},
                   element("p", {}, bold("shape " + shape), text), grid);
  });
  // Room for the tallest step, so that the panels below stay where they are.
  run.tallest ??= largest(run.steps.map(step => step.passes.reduce((total, pass) => total + 40
    + (p.shape[pass].length === 1 ? 45 : p.shape[pass][0] * (highOf(p, pass) + 1)), 0)));
  tensor.style.minHeight = Math.min(run.tallest, 420) + "px";
  tensor.replaceChildren(...parts.length ? parts : [soft(nothing(now))]);
  for (const box of tensor.querySelectorAll(".scroll")) box.scrollLeft = box.scrollWidth;
}

// A computed run has no texts and no sights: its rows are bars, to scale. A stream is one row.
function barsOf(run, pass) {
  const {shape} = run.passes, [B, T] = shape[pass], wide = T ?? B;
  const rows = rowsOf(run, pass).map(({owner, n, parts}) => {
    const {name} = run.requests[owner];
    const kinds = n ? [["pad", T ? T - n : 0], ...parts] : [["finished", wide]];
    return [name, kinds.filter(([, count]) => count > 0).map(([kind, count]) => part(
      kind, count / wide, {title: `${name}: ${count} ${DATA.names[kind]}`,
                           textContent: T || count / wide < 0.04 ? "" : name}))];
  });
  if (!T) return div("bar", ...rows.flatMap(([, parts]) => parts));
  return div("bars", ...rows.flatMap(([name, parts]) => [bold(name), div("bar", ...parts)]));
}

const highOf = ({shape}, pass) => shape[pass].length > 1 && shape[pass][0] > 16 ? 13 : 22;

function gridOf({run, number, slots, panels}, pass) {
  const p = run.passes, {owner: rows, position} = slotsOf(run, pass), shape = p.shape[pass];
  const width = shape.at(-1), flat = shape.length === 1;
  const nameOf = row => ownersOf(row).map(owner => run.requests[owner].name).join(" ");
  const labels = flat ? 0 : 4 + 8 * largest(rows.map(row => Math.min(8, nameOf(row).length)));
  // As wide as fits, so that no slot is out of sight; under 5 pixels, without gaps between them.
  const fits = (panels.tensor.clientWidth - 6 - labels) / width, gap = fits < 5 ? 0 : 1;
  const cell = Math.max(1, Math.min(64, gap ? Math.floor(fits) - 1 : fits));
  const grid = element("div", {
    className: "grid", tabIndex: 0, data: {pass, view: number},
    ariaLabel: "Slots; the arrow keys move from one to the next",
    style: `--high: ${highOf(p, pass)}px; --ring: ${cell < 10 ? "4px 0 0" : "0 0 2px"};`
      + `column-gap: ${gap}px; grid-template-columns: ${flat ? "" : labels + "px "}`
      + `repeat(${width}, ${cell}px)`});
  grid.setAttribute("role", "application");
  for (const owner of flat ? ownersOf(rows[0]) : []) {   // the stream's boundaries
    const n = rows[0].filter(each => each === owner).length;
    const {name} = run.requests[owner], textContent = n * cell > 9 * name.length ? name : "";
    grid.append(element("span", {className: "name above", title: name, textContent,
                                 style: `grid-column: span ${n}`}));
  }
  rows.forEach((row, b) => {
    if (!flat) grid.append(element("span", {className: "name", title: nameOf(row)}, nameOf(row)));
    row.forEach((owner, column) => {
      const slot = [number, pass, b, column].join("."), at = position[b][column];
      const edge = owner >= 0 && row[column - 1] >= 0 && owner !== row[column - 1] ? " edge" : "";
      const className = "slot " + kindOf(run, pass, owner, at) + edge;
      const textContent = owner >= 0 && cell > 16 ? word(run, owner, at) : "";
      slots.set(slot, element("i", {className, textContent, data: {slot}}));
      grid.append(slots.get(slot));
    });
  });
  return grid;
}

// The change: one step's slots in the shapes of several stages. Where motion is welcome, they move.

const SHAPES = ["two passes", "one rectangle", "without the pads", "one stream"];

function drawChange(panel, step) {
  const [passes, rectangle, stream] = ["chunked", "interleaved", "ragged"].map(recorded).map(
    run => ({run, passes: run.stepOf.get(step).passes}));
  const width = Math.max(rectangle.run.passes.shape[rectangle.passes[0]][1],
                         stream.run.passes.slots[stream.passes[0]]);
  const high = 20, cell = Math.min(44, (panel.clientWidth - 8) / width);
  const cells = new Map(), rows = [];
  const put = (shape, {run, passes}) => {   // where each slot is in a shape, by token or pad
    let y = 0;
    for (const pass of passes) {
      const {owner, position} = slotsOf(run, pass);
      owner.forEach((row, b) => row.forEach((r, column) => {
        const key = r < 0 ? `pad ${shape} ${b} ${column}` : r + "." + position[b][column];
        if (!cells.has(key)) {
          const textContent = r < 0 || cell < 20 ? "" : word(run, r, position[b][column]);
          const kind = kindOf(run, pass, r, position[b][column]);
          cells.set(key, {kind, textContent, places: {}});
        }
        cells.get(key).places[shape] = [column, y + b];
      }));
      y += owner.length + 0.6;
    }
    rows.push(y);
  };
  put(0, passes);
  put(1, rectangle);
  put(3, stream);
  const nodes = [...cells.values()].map(({kind, textContent, places}) => {
    const style = `width: ${Math.max(1, cell - 1)}px; height: ${high - 1}px`;
    places[2] = places[3] && places[1];   // a pad is in no stream
    return {node: element("i", {className: "slot " + kind, textContent, style}), places};
  });
  const box = div("change", ...nodes.map(({node}) => node)), bottom = high * Math.max(...rows);
  const said = element("p", {ariaLive: "polite"});
  box.style.height = bottom + 30 + "px";
  const facts = [passes, rectangle, rectangle, stream].map(({run, passes: list}, shape) => {
    const sum = name => list.reduce((total, i) => total + run.passes[name][i], 0);
    const slots = sum("slots"), pads = sum("pad_slots");
    return shape === 2 ? `${pads} pads fall out: ${slots - pads} tokens remain.`
      : `${run.name}: ${plural(list.length, "pass")}, ${plural(slots, "slot")}, `
        + `${plural(pads, "pad")}, ${ms(sum("ms"))}.`;
  });
  const show = shape => {
    for (const {node, places} of nodes) {
      const here = places[shape], [x, y] = here ?? places[1] ?? places[0];
      const top = !here && shape > 1 ? bottom : y * high;
      node.style.transform = `translate(${x * cell}px, ${top}px)`;
      node.style.opacity = here ? 1 : 0;
    }
    said.textContent = facts[shape];
    for (const [i, button] of [...buttons.children].entries()) {
      button.ariaPressed = String(i === shape);
    }
  };
  const buttons = div("shapes", ...SHAPES.map((name, i) => element(
    "button", {onclick: () => { clearTimeout(later); show(i); }}, name)));
  let later = null;
  const on = shape => {
    show(shape);
    if (shape < 3) later = setTimeout(() => box.isConnected && on(shape + 1), 1400);
  };
  panel.replaceChildren(buttons, box, said);
  on(matchMedia("(prefers-reduced-motion: reduce)").matches ? 3 : 0);
}

// Who sees whom: the keys of the slot that is pointed at, or held, and where they are.

function drawPointed() {
  const name = pointed ?? state.slot, picked = slotNamed(name);
  for (const view of views) {
    for (const node of view.lit ?? []) node.classList.remove("lit", "picked", "wrong");
    view.lit = [];
    const {run, number, panels: {sees = div()}} = view, [owner, pass, row] = picked ?? [];
    if (!view.slots) continue;
    if (run.xray.left_out) {
      sees.replaceChildren(soft(`Not measured in this run: ${run.xray.left_out}.`));
    } else if (owner === number && view.now.passes.includes(pass)) {
      const slot = slotAt(run, ...picked.slice(1)), keys = markedKeys(run, pass, row, slot);
      sees.replaceChildren(sentence(run, slot, keys), strip(run, pass, slot, keys));
      const first = sees.querySelector(".wrong")?.offsetTop ?? 0;
      sees.lastChild.scrollTop = first - sees.lastChild.offsetTop;
      lightUp(view, name, picked, keys);
    } else {
      sees.replaceChildren(soft("Point at a slot of the tensor to see which keys it sees. "
                                + "A click or a tap holds it."));
    }
  }
}

function sentence(run, slot, keys) {
  const {owner, position, kind, shift} = slot;
  const count = (mark, pad) => keys.filter(
    key => key.mark === mark && (key.owner < 0) === pad).length;
  if (owner < 0) {
    const what = owner === -1 ? "A pad"
      : `A slot of ${run.requests[-2 - owner].name}, which is finished,`;
    const sees = keys.some(({mark}) => ["past", "new", "wrong"].includes(mark))
      ? " sees keys, too, but what it computes is never read."
      : " here sees no key. It is computed all the same, and never read.";
    return element("p", {}, bold(what), sees);
  }
  const text = word(run, owner, position);
  const {name} = run.requests[owner];
  const who = `${name}, position ${position}, “${text}” (${DATA.names[kind]})`;
  const [past, fresh, wrong, missing] = ["past", "new", "wrong", "missing"].map(
    mark => count(mark, false));
  const pads = count("wrong", true), faults = [
    pads && `it sees ${plural(pads, "pad")}`,
    wrong && `it sees ${plural(wrong, "key")} that it must not`,
    missing && `it does not see ${plural(missing, "key")} of its own`,
    shift && `it is computed as if at position ${position + shift}`].filter(Boolean);
  return element("p", {}, bold(who), ` sees ${plural(past + fresh + wrong + pads, "key")}: `
    + `${past} past, ${fresh} new, ${plural(pads, "pad")}.`,
    element("span", {className: "bad"}, faults.length ? ` Wrong: ${faults.join(", ")}.` : ""));
}

function strip(run, pass, slot, keys) {  // all keys of its row, in order
  const node = element("div", {className: "keys scroll", tabIndex: 0});
  let before = "";
  for (const key of keys) {
    const page = key.past ? pageOf(run, pass, key) : null;
    const where = page !== null ? `page ${page}` : key.past ? "past" : "new";
    const who = key.owner < 0 ? "pad" : `${run.requests[key.owner].name}, position ${key.position}`;
    if (where !== before) node.append(bold(where));
    before = where;
    const textContent = key.owner < 0 ? "·" : word(run, key.owner, key.position);
    node.append(element("i", {className: key.mark, title: `${who}: ${key.mark}`, textContent}));
  }
  return node;
}

function lightUp(view, name, [number, pass, row], keys) {
  const {run, slots, lit, panels: {memory}} = view;
  const light = (node, ...classes) => {
    node?.classList.add(...classes);
    if (node) lit.push(node);
  };
  const place = column => slots.get([number, pass, row, column].join("."));
  light(slots.get(name), "picked");
  for (const {owner, position, column, past, mark} of keys) {
    if (mark === "wrong" && !past) light(place(column), "lit", "wrong");
    if (mark === "new") light(place(column), "lit");
    if (mark !== "past") continue;
    light(memory?.querySelector(`[data-holder="${owner}"]`), "lit");
    light(memory?.querySelector(`[data-page="${pageOf(run, pass, {owner, position})}"]`), "lit");
  }
}

// Requests: how far each one is, and its text so far. Of many, only those under way are listed.

const MANY = 40;
const STATES = {absent: "not arrived", waiting: "waiting", prefill: "prefilling",
                decode: "decoding", recomputed: "computed again", preempted: "preempted",
                done: "done"};

function drawRequests(view) {
  const {run, states, rows, panels: {requests}} = view, few = run.requests.length <= MANY;
  const counts = Object.entries(STATES).map(
    ([kind, word]) => [states.filter(is => is.kind === kind).length, word]);
  const line = counts.filter(([n]) => n).map(([n, word]) => `${n} ${word}`).join(", ");
  const listed = run.requests.flatMap((request, r) => {
    if (!few && ["absent", "waiting", "done"].includes(states[r].kind)) return [];
    if (!rows.has(r)) rows.set(r, requestRow(request));
    fillRow(rows.get(r), request, states[r], run.slowed);
    return [rows.get(r).node];
  });
  if (!view.list) {
    view.list = element("div", {className: "scroll", tabIndex: 0});
    requests.replaceChildren(element("p"), view.list);
  }
  requests.firstChild.textContent = line + (few ? "." : ". Only those under way are listed.");
  const {children} = view.list;
  if (listed.length !== children.length || listed.some((node, i) => node !== children[i])) {
    view.list.replaceChildren(...listed);
  }
}

function requestRow(request) {
  const [state, waits, prompt, answer] = ["state", "waits", "prompt", "answer"].map(
    className => element("span", {className}));
  const text = element(
    "button", {className: "text", title: "all of the text, or its end", dir: "auto"},
    element("span", {className: "lines"}, prompt, answer));
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

function fillRow(row, request, {words, active, tokens}, slowed) {
  const said = [words, active, tokens].join();
  if (said === row.said) return;
  row.said = said;
  const gaps = gapsOf(request.ms.slice(0, tokens)), first = request.steps[0] - request.arrival + 1;
  const wait = slowed ? "" : ", " + ms(request.ms[0] - request.arrived);
  row.node.classList.toggle("running", active);
  row.state.textContent = words;
  row.texts[1] = textOf(request.generated.slice(0, tokens));
  fillTexts(row);
  row.waits.textContent = !tokens ? `prompt of ${plural(request.prompt.length, "token")}`
    : `${plural(tokens, "token")} · TTFT ${plural(first, "step")}${wait}`
      + (gaps.length && !slowed ? `\nITL mean ${ms(mean(gaps))}, longest ${ms(largest(gaps))}`
        : "");
}

// Memory: each request's cache within its room; in paged and prefix the pool and the block tables.

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
  run.largest ??= largest(run.requests.flatMap(
    request => request.rooms.map(({room}) => room ?? 0)));
  const limit = run.knobs.max_kv_tokens, columns = run.passes.columns[now.pass] ?? 0;
  const rows = holders.map(({r, name, computed, holds}) => {
    const pads = Math.max(0, columns - computed);   // of a static batch: its rows share a cache
    const bar = element("div", {className: "bar", style: `width: ${100 * holds / run.largest}%`},
                        part("past", computed / holds), ...pads ? [part("pad", pads / holds)] : []);
    const title = plural(computed, "token")
      + (pads ? `, ${pads} columns of pads and finished slots` : "");
    return element("div", {className: "holder", title, data: {holder: r}}, bold(name), bar,
                   `${computed} of ${holds}`);
  });
  const used = holders.reduce((sum, {computed}) => sum + computed, 0);
  const room = holders.reduce((sum, {holds}) => sum + holds, 0);
  const whole = limit
    ? [div("bar", part("past", used / limit), part("room", (room - used) / limit))] : [];
  const words = limit ? `; at most ${number(limit)} may be reserved.` : "; no limit was set.";
  const said = `${plural(used, "token")} in caches with room for ${number(room)}${words}`;
  return [element("p", {}, said), ...whole, div("scroll", ...rows)];
}

function poolOf(view, holders) {
  const {run, now} = view, {pages, page_size: size} = run.pool;
  const tiny = pages > (innerWidth <= 760 ? 64 : 160);
  const owners = Array.from({length: pages}, () => []), filled = Array(pages).fill(0);
  const cached = new Set(run.passes.cached[now.pass] ?? []);
  const counts = {held: 0, shared: 0, cached: 0, free: 0};
  for (const {name, holds, computed} of holders) {
    holds.forEach((page, i) => {
      owners[page].push(name);
      filled[page] = Math.max(filled[page], Math.min(size, computed - i * size));
    });
  }
  view.pages ??= owners.map((_, page) => element("div", {data: {page}}));
  owners.forEach((by, page) => {
    const kind = by.length > 1 ? "shared" : by.length ? "held"
      : cached.has(page) ? "cached" : "free";
    const refs = by.length ? `in the block tables of ${by.join(", ")} (ref_count ${by.length}), `
      + `${filled[page]} of ${size} tokens`
      : `in the free queue${kind === "cached" ? ", cached" : ""}`;
    const said = `page ${page}, ${refs}`, cell = view.pages[page];
    counts[kind]++;
    if (cell.title === said) return;     // most pages stay as they are from step to step
    const who = kind === "shared" ? `${by[0]} +${by.length - 1}`
      : by[0] ?? (kind === "cached" ? "cached" : "");
    Object.assign(cell, {title: said, className: `page ${kind}${tiny ? " tiny" : ""}`});
    cell.replaceChildren(...tiny ? [] : [element("small", {}, String(page)), who],
                         element("u", {style: `width: ${100 * filled[page] / size}%`}));
  });
  const tables = holders.map(({r, name, holds}) => element(
    "div", {className: "holder table", data: {holder: r}}, bold(name),
    element("span", {}, holds.join(" "))));
  view.pool ??= div("pool" + (tiny ? " tiny" : ""), ...view.pages);
  const said = `${counts.held + counts.shared} of ${plural(pages, "page")} in block tables, `
    + `${counts.shared} of them in several; ${counts.cached + counts.free} in the free queue, `
    + `${counts.cached} of them cached; ${plural(size, "token")} in a page.`
    + (run.computed && run.knobs.pages > pages ? " More these requests could never fill." : "");
  return [element("p", {}, said), view.pool, element(
    "p", {}, bold("Block tables"), ": a request's pages in the order of its tokens"),
    div("scroll", ...tables)];
}

// The bill: sums over all passes so far.

const BILL = {   // what a line means
  "useful tokens": "tokens that are computed for the first time",
  finished: "slots of requests that are done, in a batch that is not",
  "computed again": "tokens that had been computed before",
  "scores, a head and layer": "products of a query and a key",
  "useful scores": "those that the causal rule uses",
  "padded keys": "keys that attention reads beside the requests' own",
  "copied keys and values": "gathered into a rectangle, or from pages",
  "TTFT, mean": "time to a request's first token", "ITL, mean": "time between two of its tokens"};

function drawBill({run, now, states, panels: {bill}}) {
  const total = name => now.pass < 0 ? 0 : run.totals[name][now.pass], slots = total("slots");
  const {step} = now, before = run.requests.map(({steps}) => atMost(steps, -1));   // a live run's
  const firsts = run.requests.filter((_, r) => states[r].tokens && !before[r]).map(
    ({ms, arrived}) => ms[0] - arrived);
  const gaps = atMost(run.gaps, step, ([step]) => step), slowed = run.slowed ? "slowed" : "";
  const [, , sum, longest] = run.gaps[gaps - 1] ?? [];
  const ofSlots = name => [number(total(name)), percent(total(name), slots, "slots")];
  const rows = [
    ["forward passes", number(now.pass + 1)],
    ["generated tokens", number(states.reduce((sum, is, r) => sum + is.tokens - before[r], 0))],
    ["slots", number(slots)],
    ["useful tokens", ...ofSlots("useful")],
    ["pads", ...ofSlots("pad_slots")],
    ["finished", ...ofSlots("finished_slots")],
    ["computed again", ...ofSlots("recomputed")],
    ["scores, a head and layer", number(total("score_entries"))],
    ["useful scores", number(total("useful_scores")),
     percent(total("useful_scores"), total("score_entries"), "scores")],
    ["padded keys", number(total("padded_keys"))],
    ["copied keys and values", (total("copied_bytes") / 1e6).toFixed(1) + " MB"],
    ["time in passes", ms(total("ms")), DATA.calculated || run.computed ? "calculated" : ""],
    ["TTFT, mean", firsts.length ? ms(mean(firsts)) : "–",
     slowed || plural(firsts.length, "request")],
    ["ITL, mean", gaps ? ms(sum / gaps) : "–", slowed],
    ["ITL, longest", gaps ? ms(longest) : "–", slowed]];
  const lines = rows.map(([name, value, note = ""]) => element(
    "tr", {}, element("th", {scope: "row", title: BILL[name] ?? ""}, name),
    element("td", {}, value), element("td", {className: "soft"}, note)));
  bill.replaceChildren(element("table", {}, ...lines));
}

// The scoreboard: a line for each stage's figuresOf, calculated. pick(name): shows its run.

const rounded = x => number(Math.round(x));
const SCORES = {   // figure: title, its text, what it means
  passes: ["passes", number, "forward passes"],
  useful: ["useful", x => Math.round(100 * x) + "%",
           "share of the slots that hold a token, for the first time"],
  speed: ["tokens/s", rounded, "tokens per second"],
  first: ["TTFT, ms", rounded, "the longest wait for a first token"],
  next: ["worst gap, ms", rounded, "the longest time between two tokens of a request"],
  at_once: ["at once", number, "the most requests that run at the same time"],
  memory: ["memory, tokens", ([held, limit]) => [number(held), element(
    "small", {}, limit ? ` of ${number(limit)}` : " no limit")],
           "the most keys and values that have room reserved in a pass"]};

function scoreboard(scores, pick, marked = {}) {
  const ran = Object.values(scores).filter(Boolean), limited = ran.some(({memory}) => memory[1]);
  const most = Object.fromEntries(["speed", "first", "next"].map(   // bars, too, if they differ
    key => [key, ran.map(score => score[key]).sort((a, b) => b - a)]).map(
    ([key, values]) => [key, values[0] > 1.05 * values.at(-1) ? values[0] : 0]));
  const lines = Object.entries(scores).map(([name, score]) => {
    const cells = score ? Object.entries(SCORES).map(([key, [, text]]) => element("td", {
      data: {score: key}, style: most[key] ? `--share: ${100 * score[key] / most[key]}%` : ""},
      ...[text(score[key])].flat()))
      : [element("td", {colSpan: 7, className: "soft"},
                 score === undefined ? "computing …" : "no request fits into its memory")];
    const label = marked[name] ? element("small", {}, " " + marked[name]) : "";
    const title = pick ? element("button", {
      onclick: () => pick(name), ariaPressed: String(marked[name] === "shown")}, name) : name;
    const wrong = score?.wrong
      ? element("span", {className: "bad"}, ` ${score.wrong} requests WRONG`) : "";
    const className = limited && score && !score.memory[1] ? "unlimited" : "";
    return element("tr", {className}, element("th", {scope: "row"}, title, label, wrong), ...cells);
  });
  const heads = Object.values(SCORES).map(
    ([text, , title]) => element("th", {scope: "col", title}, text));
  const table = element("table", {className: "scores"}, element(
    "tr", {}, element("th", {scope: "col"}, "stage"), ...heads), ...lines);
  return div("", table, soft(["useful", "next", "at_once", "memory"].map(
    key => `${SCORES[key][0]}: ${SCORES[key][2]}`).join("; ") + "."));
}
