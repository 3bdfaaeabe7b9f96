// The state of the page, the address that says it, and the controls. runs.js has the data,
// panels.js draws them, own.js has the visitor's own requests.

const names = [...RUNS.keys()];
// stop: of the walk; all: whether all panels are shown, not its scene only; own: see own.js
const state = {run: names[0], beside: "", clock: "step", tick: 0, slot: null, stop: null,
               all: false, own: null};
let ticks = [];       // of the clock: the steps of the shown runs, or the ms at which they end
let pointed = null;   // the slot under the mouse or the keyboard; state.slot is held
const answered = new Map();   // stop -> the choice that was made there
let views = [];       // for each run that is shown {run, number, panels, now, states}; see fill
const $ = id => document.getElementById(id);

// --- the state, and the address ------------------------------------------------------------------

const ADDRESS = ["run", "beside", "step", "ms", "slot", "stop", "all", "theme"];
const inScene = () => !state.own && state.stop !== null && !state.all;
const hasQuestion = stop => Boolean(DATA.walk[stop].ask) && !answered.has(stop);
const asking = () => inScene() && hasQuestion(state.stop);
const sceneOf = stop => hasQuestion(stop) ? DATA.walk[stop].ask.show : DATA.walk[stop].show;
const runNamed = name => state.own ? ownRun(name) : recorded(name);
const shown = () => [state.run, state.beside].filter(Boolean).map(runNamed).map(prepare);
const valueOf = step => state.clock === "step" ? step.step : step.end;
const valueNow = () => ticks[state.tick] ?? 0;

const isLow = () => innerHeight < 760;   // a laptop's screen

function setTicks(value) {
  const values = shown().flatMap(run => run.steps.map(valueOf));
  ticks = [...new Set(values)].sort((a, b) => a - b);
  // An address has them rounded to a thousandth.
  Object.assign(state, {value, tick: Math.max(0, atMost(ticks, value + 6e-4) - 1)});
}

function address() {
  const parts = new URLSearchParams(state.own ? ownParts(state.own) : {});
  const {theme} = document.documentElement.dataset, isWalk = state.stop !== null && !state.own;
  const isAtStart = state.own && state.tick === 0 && state.clock === "ms";
  parts.set("run", state.run);
  if (state.beside) parts.set("beside", state.beside);
  if (!isAtStart) parts.set(state.clock, Math.round(1e3 * valueNow()) / 1e3);
  if (state.slot) parts.set("slot", state.slot);
  if (isWalk) parts.set("stop", state.stop);
  if (isWalk && state.all) parts.set("all", 1);
  if (theme) parts.set("theme", theme);
  return "#" + parts;
}

function readAddress() {                 // and says which of it does not exist
  const parts = new URLSearchParams(location.hash.slice(1)), lost = [];
  const stop = Number(parts.get("stop") ?? NaN), hadOwn = Boolean(state.own);
  if (["dark", "light"].includes(parts.get("theme"))) setTheme(parts.get("theme"));
  Object.assign(state, {stop: DATA.walk[stop] ? stop : null, all: parts.has("all"), slot: null});
  setOwn(ownFrom(parts, lost));
  written = JSON.stringify(state.own);
  if (!state.own) lost.push(...[...parts.keys()].filter(name => !ADDRESS.includes(name)));
  readRuns(parts, lost);
  if (parts.has("stop") && state.stop === null) lost.push(`stop=${parts.get("stop")}`);
  note(lost.length ? `In this link, ${lost.join(", ")} could not be read.` : "");
  const isWalk = !state.own && !parts.has("run") && DATA.walk.length;
  if (isWalk) {
    showStop(state.stop ?? 0);
    return;
  }
  setTicks(Number(parts.get(state.clock)) || 0);
  state.slot = slotNamed(parts.get("slot")) ? parts.get("slot") : null;
  build();
  if (state.own && !hadOwn && innerWidth <= 760) $("own").scrollIntoView();
}

function readRuns(parts, lost) {         // and the clock
  const known = state.own ? Object.keys(STAGE_KNOBS) : names;
  const usual = state.own ? "paged" : names[0];
  const namesNothing = !state.own && !parts.has("run");   // a page without a walk: its first runs
  const [run, beside] = namesNothing ? names : [parts.get("run"), parts.get("beside")];
  state.run = known.includes(run) ? run : usual;
  state.beside = known.includes(beside) ? beside : "";
  const isInMs = parts.has("ms") || (state.own && !parts.has("step"));
  state.clock = isInMs ? "ms" : "step";
  for (const name of ["run", "beside"]) {
    const wanted = parts.get(name);
    if (!wanted || wanted === state[name]) continue;
    lost.push(`${name}=${wanted} (${state[name] ? `${state[name]} is shown` : "none is shown"})`);
  }
}

function note(text, className = "bad") {
  Object.assign($("note"), {textContent: text, className});
}

function go(tick) {                      // to another moment
  tick = Math.max(0, Math.min(ticks.length - 1, tick));
  if (tick === state.tick) return;
  Object.assign(state, {tick, value: ticks[tick], slot: null});
  pointed = null;
  render();
}

// Other runs, or another clock, at the same moment. settings: of the state
function change(settings) {
  const {k} = views[0].now, value = valueNow();
  Object.assign(state, settings, {slot: null});
  pointed = null;
  const {steps} = shown()[0];            // another run may have fewer
  const step = steps[Math.max(0, Math.min(k, steps.length - 1))];
  const isNewClock = settings.clock && step;
  setTicks(isNewClock ? valueOf(step) : value);
  build();
}

function showStop(stop) {                // of the walk
  const {run, beside, clock, step, slot = null} = sceneOf(stop);
  setOwn(null);
  Object.assign(state, {run, beside, clock, slot, stop, all: false});
  pointed = null;
  setTicks(valueOf(shown()[0].stepOf.get(step)));
  build();
  if (scrollY > $("walk").offsetTop) scrollTo(0, $("walk").offsetTop);
}

const visit = stop => navigate(`stop=${stop}`);
const openOwn = () => navigate(lastOwn);

function answer(choice) {
  answered.set(state.stop, choice);
  showStop(state.stop);
}

// A slot's name is "view.pass.row.column". Its four numbers, if there is such a slot.
function slotNamed(name) {
  const numbers = (name ?? "").split(".").map(Number);
  if (numbers.length !== 4 || numbers.join(".") !== name) return null;
  const [viewNumber, ...place] = numbers, run = shown()[viewNumber];
  const exists = run && !run.computed && slotAt(run, ...place);
  return exists ? numbers : null;
}

// --- the panels ----------------------------------------------------------------------------------

const PANELS = {timeline: "Timeline", plan: "Plan of this step", tensor: "Tensor",
                sees: "Who sees whom", bill: "Bill so far", memory: "Memory", requests: "Requests",
                score: "Scoreboard", change: "Change of shape: from rows to a stream"};
const ONCE = ["score", "change"];        // for all runs together
const OWN = ["score", "timeline", "tensor", "memory"];
const ALL = ["timeline", "plan", "tensor", "sees", "bill", "memory", "requests", "score"];
const DRAW = {timeline: moveCursor, plan: drawPlan, tensor: drawTensor, bill: drawBill,
              requests: drawRequests, memory: drawMemory};

function build() {                       // everything anew: other panels, another width or theme
  const stop = inScene() ? DATA.walk[state.stop] : null;
  views = shown().map((run, number) => ({run, number, panels: {}}));
  $("own").hidden = !state.own;          // first: hidden, it has no width
  $("other").hidden = views.length < 2;
  $("views").className = [
    views.length === 2 ? "two" : "one", stop || state.own ? "scene" : "",
    asking() ? "asking" : ""].join(" ");
  $("views").replaceChildren();
  for (const name of panelNames(stop)) {
    for (const view of ONCE.includes(name) ? [views[0]] : views) addPanel(view, name);
  }
  if (stop) markPanel(stop);
  const known = state.own ? Object.keys(STAGE_KNOBS) : names;
  $("run").replaceChildren(...known.map(option));
  $("beside").replaceChildren(...["", ...known].map(option));
  fill();
  showWalk();
}

function panelNames(stop) {
  if (state.own) return OWN;
  if (!stop) return ALL;
  return stop.panels.filter(name => name !== "change" || !asking());   // it would be the answer
}

function addPanel(view, name) {
  const panel = element("div");
  view.panels[name] = panel;
  if (name === "sees") panel.ariaLive = "polite";
  if (!state.own || name !== "timeline") {
    $("views").append(framed(name, view.run, panel));
  } else if (view.number === 0) {        // the timelines stand beside the controls
    $("lines").replaceChildren(panel);
  } else {
    $("other").lastElementChild.replaceChildren(panel);
  }
}

function markPanel(stop) {               // the one to look at: the first
  const view = views[stop.look] ?? views[0], [first] = panelNames(stop);
  const panel = view.panels[first] ?? $("views").firstChild.lastChild;
  panel.parentNode.classList.add("look");
}

const option = value => element("option", {value}, value || "nothing");

function showWalk() {                    // on a phone it scrolls sideways; its first button stays
  const list = $("walk").firstChild, marked = list.querySelector("[aria-current]");
  if (marked) list.scrollLeft = marked.offsetLeft - list.firstChild.offsetWidth - 8;
}

function framed(name, run, panel) {      // a panel's frame and title
  const title = PANELS[name], who = ONCE.includes(name) ? "" : run.name;
  const head = element("h2", {}, title, element("small", {}, " · " + panelNote(name, run)));
  return element("section", {className: "panel " + name, style: `--area: ${name}`,
                             ariaLabel: `${title}, ${who}`}, head, panel);
}

function panelNote(name, run) {
  if (name === "change") return `step ${sceneOf(state.stop).step}`;
  if (name !== "score") return run.name;
  const lengths = state.own || inScene() ? "" : "these lengths on every stage, ";
  return `${lengths}${DATA.clock}; waits are the longest, in ms`;
}

function fill() {                        // the frames that are there, with the runs as they are now
  views = shown().map((run, number) => (
    {run, number, panels: views[number].panels, rows: new Map()}));
  for (const view of views) {
    if (state.own) view.high = ownRowHeight(view.number);
    else if (views.length === 2) view.high = halfRowHeight(view.run);
    view.bare = state.own && view.number === 0 && innerWidth > 760;
    if (view.panels.timeline) drawTimeline(view);
  }
  const {score, change: changePanel} = views[0].panels;
  if (state.own) {
    drawOwn(views[0]);
    drawScores();
  } else {
    score?.replaceChildren(scoreboardNow());
  }
  if (changePanel) drawChange(changePanel, sceneOf(state.stop).step);
  drawLegend(views[0].panels);
  render();
}

function halfRowHeight({requests}) {     // in pixels, if two timelines shall be in sight
  const most = innerWidth <= 760 ? 11 : 13;
  const fits = Math.floor((innerHeight - 440) / 2 / requests.length);
  return Math.max(1, Math.min(most, fits));
}

function drawLegend({sees, timeline, change: changePanel}) {   // of what can be seen now
  const has = count => shown().some(run => run.totals[count].at(-1) > 0);
  const isSeen = {
    prefill: true, decode: true, recomputed: has("recomputed"),
    pad: has("pad_slots") || changePanel, finished: has("finished_slots"), waiting: timeline,
    past: sees, new: sees, wrong: sees && shown().some(({xray}) => xray.wrong)};
  const words = {...DATA.names, past: "seen: key in the cache", new: "seen: key of this pass",
                 wrong: "seen, and must not be"};
  const kinds = Object.keys(isSeen).filter(kind => isSeen[kind]);
  $("legend").replaceChildren(...kinds.map(kind => element(
    "span", {}, element("i", {className: kind}), words[kind])));
}

function render() {                      // what depends on the moment
  for (const view of views) {
    view.now = momentOf(view.run, state.clock, valueNow());
    view.states = view.run.requests.map(request => stateOf(view.run, request, view.now));
    for (const name of Object.keys(view.panels)) DRAW[name]?.(view);
  }
  drawPointed();
  drawControls();
  if (state.own) views.forEach(sayOwn);
  writeAddress();
}

function scoreboardNow() {
  const [{run}] = views;
  if (!inScene()) {
    const {policy = "fcfs"} = run.knobs;
    const mark = policy === "fcfs" ? "recorded" : `recorded under ${policy}, here fcfs`;
    run.would ??= wouldHave(run);
    return scoreboard(run.would, null, {[run.stage]: mark});
  }
  const scores = {};
  for (const name of DATA.walk[state.stop].rows) scores[name] = figuresOf(recorded(name));
  return scoreboard(scores, name => navigate(String(
    new URLSearchParams({run: name, ms: ticks[state.tick], stop: state.stop, all: 1}))));
}

// --- the address bar, and the browser's history --------------------------------------------------

const OURS = {ours: true};               // marks our entries of the history
let later = null;                        // a timer: the address is written
let written = "";                        // state.own, as the address has it

function writeAddress() {                // not at every step: browsers refuse 100 in 30 seconds
  clearTimeout(later);
  later = setTimeout(saveAddress, 400);
}

function saveAddress() {                 // a change of requests is an entry: Back takes it back
  clearTimeout(later);
  const own = JSON.stringify(state.own);
  if (own !== written) history.pushState(OURS, "", address());
  else history.replaceState(OURS, "", address());
  written = own;
}

function keepChange() {                  // an entry for it, before that of the address that came
  const foreign = location.hash;
  const isWritten = !state.own || JSON.stringify(state.own) === written;
  if (isWritten || foreign === address()) return;
  clearTimeout(later);
  history.replaceState(OURS, "", address());
  history.pushState(OURS, "", foreign || "#");
}

function navigate(to) {                  // to what an address says; Back leads to where one was
  play(false);
  saveAddress();
  if (state.own) lastOwn = address().slice(1);
  history.pushState(OURS, "", "#" + to);
  readAddress();
}

// --- controls ------------------------------------------------------------------------------------

let timer = null;                        // while it plays
const about = "how an LLM server batches requests, step by step; ms are "
  + (DATA.calculated ? "calculated for an A100" : "measured");

function drawControls() {
  const {walk} = DATA, stop = state.own ? null : walk[state.stop];
  for (const id of ["run", "beside", "clock"]) $(id).value = state[id];
  $("now").textContent = nowWords();
  const [ownButton, ...stopButtons] = $("walk").querySelectorAll("button");
  const current = state.own ? ownButton : stopButtons[state.stop];
  for (const button of [ownButton, ...stopButtons]) {
    button.ariaCurrent = button === current ? "step" : null;
  }
  $("stop").hidden = !walk.length || Boolean(state.own);
  drawStop(stop);
  $("controls").hidden = inScene();
  $("stages").hidden = names.length === 1 && !state.own;
  $("edit").hidden = Boolean(state.own);
  $("all").hidden = !stop;
  $("all").textContent = state.all ? "this scene only" : "all panels";
  $("on").hidden = Boolean(state.own) || !walk.length;
  $("on").textContent = onWords(stop);
  $("about").textContent = state.own?.title || about;
  $("about").className = state.own?.title ? "title" : "";
  document.title = `${titleOf(stop)} · nanoBatch explorer`;
}

function nowWords() {
  const end = ticks.at(-1) ?? 0;
  if (state.clock === "step") return `step ${valueNow()} of ${end}`;
  return `step ${views[0].now.step}: ${ms(valueNow()).slice(0, -3)} of ${ms(end)}`;
}

function onWords(stop) {                 // of the button that leads on
  if (!stop) return "guided walk";
  const {walk} = DATA, next = state.stop + 1;
  return walk[next] ? `next: ${next + 1}/${walk.length}` : "your own requests";
}

function titleOf(stop) {
  if (state.own) return state.own.title || "your own requests";
  return stop?.title ?? state.run;
}

function drawStop(stop) {                // its question, or its text
  const drawn = stop ? [state.stop, asking(), answered.get(state.stop)].join() : "";
  if ($("stop").dataset.drawn === drawn) return;
  $("stop").dataset.drawn = drawn;
  $("stop").className = stop ? "on" : "";
  if (!stop) {
    $("stop").replaceChildren("New to batching? Take the guided walk.");
  } else if (asking()) {
    $("stop").replaceChildren(stop.ask.question, choiceButtons(stop.ask.choices));
  } else {
    $("stop").replaceChildren(
      stop.ask ? verdictOnAnswer(stop.ask) : "", stop.text, ...stop.ask ? [askAgain()] : []);
  }
}

function choiceButtons(choices) {
  const buttons = choices.map((text, i) => element("button", {onclick: () => answer(i)}, text));
  const show = element("button", {onclick: () => answer(null)}, "show me");
  return div("choices", ...buttons, show);
}

function verdictOnAnswer({choices, right}) {
  const choice = answered.get(state.stop) ?? null;   // null: nothing was chosen
  if (choice === null) return "";
  return choice === right ? "Right. " : `No, not “${choices[choice]}”. `;
}

function askAgain() {
  return element("button", {className: "again", onclick: () => {
    answered.delete(state.stop);
    showStop(state.stop);
  }}, "ask again");
}

// A tick takes 1 / speed seconds; on the clock in ms, that long on average.
function play(on) {
  clearTimeout(timer);
  timer = null;
  if (on && state.tick >= ticks.length - 1) go(0);
  if (on) playOn();
  $("play").textContent = timer ? "pause" : "play";
}

function playOn() {                      // to the next tick, and the one after it
  const end = ticks.length - 1;
  if (state.tick >= end) return;
  const average = (ticks[end] - ticks[0]) / end;
  const span = ticks[state.tick + 1] - ticks[state.tick];
  const share = state.clock === "ms" ? span / average : 1;
  timer = setTimeout(() => {
    go(state.tick + 1);
    if (state.tick < end) playOn(); else play(false);
  }, share * 1000 / $("speed").value);
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.documentElement.style.colorScheme = theme || "light dark";
}

function turnTheme() {
  setTheme(isDark() ? "light" : "dark");
  build();
}

// --- a picture of the page -----------------------------------------------------------------------

const SHARP = 2;                         // pixels of the picture for one of the page
// What a slide shows: no control, and no walk.
const OFF_PICTURE = "#walk, #transport, #controls, #presets, #pasting, #own > p, header button, "
  + "header details, #knobs, #more, #heads span + span + span, .row button, .arrival, .again, "
  + ".choices, script, noscript";

// Characters that a token may have, and no XML: controls, and half of a pair.
const NOT_XML = /[\0-\x08\x0b\x0c\x0e-\x1f\ufffe\uffff]|\p{Surrogate}/gu;

function copyOf(node) {                  // with pictures in place of canvases, and of values
  const copy = node.cloneNode(true);
  const canvases = node.querySelectorAll("canvas"), inputs = node.querySelectorAll("input");
  for (const [i, place] of [...copy.querySelectorAll("canvas")].entries()) {
    const {width, height} = canvases[i].getBoundingClientRect();
    const style = `display: block; width: ${width}px; height: ${height}px`;
    place.replaceWith(element("img", {src: canvases[i].toDataURL(), style}));
  }
  for (const [i, input] of [...copy.querySelectorAll("input")].entries()) {
    input.setAttribute("value", inputs[i].value);
  }
  for (const control of copy.querySelectorAll(OFF_PICTURE)) control.remove();
  return copy;
}

function heightOfCopy() {                // of the page without its controls, in pixels
  const holder = element("div", {style:
    `position: absolute; left: 0; top: 0; width: ${document.body.clientWidth}px;`
    + "visibility: hidden"}, ...copyOf(document.body).childNodes);
  document.body.append(holder);
  const height = Math.ceil(holder.getBoundingClientRect().height) + 24;
  holder.remove();
  return height;
}

function isDark() {                      // by the button, else by the system
  const {theme} = document.documentElement.dataset;
  return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
}

// The page as the text of an SVG, which holds its elements and its own style.
function drawingOf(width, height) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const frame = document.createElementNS("http://www.w3.org/2000/svg", "foreignObject");
  for (const node of [svg, frame]) {
    node.setAttribute("width", width);
    node.setAttribute("height", height);
  }
  const theme = isDark() ? "dark" : "light";
  svg.style.colorScheme = theme;
  svg.dataset.theme = theme;
  const style = document.createElement("style");
  style.textContent = document.querySelector("style").textContent;
  frame.append(style, copyOf(document.body));
  svg.append(frame);
  const text = new XMLSerializer().serializeToString(svg);
  return text.replace(NOT_XML, "\ufffd");
}

async function drawPage() {              // a canvas of what the page shows now
  const width = innerWidth, height = heightOfCopy(), image = new Image();
  image.src = "data:image/svg+xml;charset=utf-8," + encodeURIComponent(drawingOf(width, height));
  await image.decode();
  const canvas = element("canvas", {width: SHARP * width, height: SHARP * height});
  const pen = canvas.getContext("2d");
  pen.fillStyle = getComputedStyle(document.body).backgroundColor;
  pen.fillRect(0, 0, canvas.width, canvas.height);
  pen.scale(SHARP, SHARP);
  pen.drawImage(image, 0, 0);
  return canvas;
}

async function savePicture() {
  try {
    const url = (await drawPage()).toDataURL("image/png");
    element("a", {href: url, download: `${document.title.replace(/\W+/g, "-")}.png`}).click();
  } catch {
    note("This browser does not draw a page into a picture; take a screenshot.");
  }
}

// --- keys and pointers ----------------------------------------------------------------------------

function hold(name) {                    // a slot; the same one again, or none: lets it go
  state.slot = name !== state.slot ? name : null;
  render();
}

const KEYS = {   // far: 10 with Shift, else 1
  ArrowLeft: far => go(state.tick - far), ArrowRight: far => go(state.tick + far),
  Home: () => go(0), End: () => go(ticks.length - 1),
  " ": () => play(!timer),
  Escape: () => { pointed = null; hold(null); }};
const MOVES = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};

function onKey(event) {
  const {target, key} = event, grid = target.closest(".grid");
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (target.closest("select, input, textarea")) return;
  if (key === " " && target.closest("button, summary")) return;
  if (grid && MOVES[key]) movePointer(grid, MOVES[key]);
  else if (grid && key === "Enter") holdPointed(grid);
  else if (KEYS[key]) onPageKey(key, event.shiftKey);
  else return;
  event.preventDefault();
}

function onPageKey(key, shift) {
  const {activeElement} = document;
  KEYS[key](shift ? 10 : 1);
  const isGone = activeElement !== document.body && !activeElement.isConnected;
  if (isGone) $("play").focus();
}

function movePointer(grid, [down, right]) {   // from slot to slot; first to the first one
  const viewNumber = Number(grid.dataset.view), pass = Number(grid.dataset.pass);
  const [ofView, ofPass, row, column] = slotNamed(pointed ?? state.slot) ?? [];
  const isInGrid = ofView === viewNumber && ofPass === pass;
  const place = isInGrid ? [row + down, column + right] : [0, 0];
  const name = [viewNumber, pass, ...place].join(".");
  const slot = views[viewNumber].slots.get(name);
  if (!slot) return;
  pointed = name;
  slot.scrollIntoView({block: "nearest", inline: "nearest"});
  drawPointed();
}

function holdPointed(grid) {
  const {view, pass} = grid.dataset;
  hold(pointed);
  document.querySelector(`.grid[data-view="${view}"][data-pass="${pass}"]`)?.focus();
}

const slotOf = event => event.target.dataset.slot ?? null;

function nearest(event) {                // the slot that is meant: between two, or on a narrow one
  const grid = event.target.closest(".grid");
  if (!grid || slotOf(event)) return slotOf(event);

  function distance(node) {
    const {left, right, top, bottom} = node.getBoundingClientRect();
    return Math.hypot(event.clientX - (left + right) / 2, event.clientY - (top + bottom) / 2);
  }

  const slots = [...grid.querySelectorAll(".slot")];
  return slots.reduce((a, b) => distance(b) < distance(a) ? b : a).dataset.slot;
}

function seek(event) {                   // a press or drag on the timeline
  const view = views.find(({box}) => box?.contains(event.target));
  const isHover = event.type === "pointermove" && !event.buttons;
  if (!view || isHover) return;
  const value = view.valueAt(event.clientX - view.box.getBoundingClientRect().left);
  go(atMost(ticks, value) - (state.clock === "step" ? 1 : 0));
}

// --- the beginning -------------------------------------------------------------------------------

function begin() {
  $("formula").textContent = formula(DATA.gpu);
  beginWalk();
  beginOwn();
  beginControls();
  beginPointers();
  beginEvents();
  readAddress();
}

function formula({weights, vocabulary, key, row: rowTime, tile, overhead}) {
  return `A pass reads the weights, ${ms(1e3 * (weights + vocabulary))}, and `
    + `the keys and values in sight, ${ms(1e6 * key)} for 1,000 tokens. Its arithmetic takes `
    + `${ms(1e3 * tile * rowTime)}, and ${ms(1e5 * rowTime)} for 100 slots. The time is the root `
    + `of the sum of both squares, and ${ms(1e3 * overhead)} of overhead.`;
}

function beginWalk() {
  const item = (...children) => element("li", {}, ...children);
  const own = element("button", {id: "mine", onclick: openOwn}, "try your own",
                      element("span", {}, " requests"));
  const stops = DATA.walk.map(({title}, i) => item(
    element("button", {onclick: () => visit(i)}, `${i + 1} ${title}`)));
  const list = $("walk").querySelector("ol");
  list.append(item(own));
  if (stops.length) list.append(element("li", {className: "soft"}, "or walk:"), ...stops);
}

function beginControls() {
  for (const id of ["run", "beside", "clock"]) {
    $(id).onchange = () => change({[id]: $(id).value});
  }
  const keys = {first: "Home", back: "ArrowLeft", play: " ", next: "ArrowRight", last: "End"};
  for (const [id, key] of Object.entries(keys)) $(id).onclick = () => KEYS[key](1);
  $("speed").onchange = () => timer && play(true);
  $("theme").onclick = turnTheme;
  $("picture").onclick = savePicture;
  $("all").onclick = () => { state.all = !state.all; build(); };
  $("edit").onclick = () => navigate(ownOf(views[0].run, state.beside));
  $("on").onclick = () => {
    const next = (state.stop ?? -1) + 1;
    if (DATA.walk[next]) {
      visit(next);
      return;
    }
    openOwn();
    $("mine").focus();
  };
}

function beginPointers() {
  const main = $("views");
  main.addEventListener("pointerover", event => {
    if (event.pointerType === "touch" || slotOf(event) === pointed) return;
    pointed = slotOf(event);
    drawPointed();
  });
  main.addEventListener("mousedown", event => {
    if (slotOf(event)) event.preventDefault();   // the focus stays where it is
  });
  main.addEventListener("click", event => {
    const slot = nearest(event);
    if (slot) hold(slot);
  });
  for (const type of ["pointerdown", "pointermove"]) {
    main.addEventListener(type, seek);
    $("bench").addEventListener(type, seek);
  }
}

function beginEvents() {
  document.addEventListener("keydown", onKey);
  let width = innerWidth, low = isLow();
  addEventListener("resize", () => {     // a phone's bars change its height all the time
    if (innerWidth !== width || isLow() !== low) build();
    width = innerWidth;
    low = isLow();
  });
  addEventListener("popstate", event => {
    play(false);
    if (!event.state) keepChange();      // a foreign address, not one of ours by Back
    readAddress();
  });
  addEventListener("hashchange", () => { if (location.hash !== address()) readAddress(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
}

begin();
