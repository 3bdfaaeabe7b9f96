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
const asking = () => inScene() && Boolean(DATA.walk[state.stop].ask) && !answered.has(state.stop);
const sceneOf = i => DATA.walk[i].ask && !answered.has(i) ? DATA.walk[i].ask.show
  : DATA.walk[i].show;
const runNamed = name => state.own ? ownRun(name) : recorded(name);
const shown = () => [state.run, state.beside].filter(Boolean).map(runNamed).map(prepare);
const valueOf = step => state.clock === "step" ? step.step : step.end;

const isLow = () => innerHeight < 760;   // a laptop's screen

function setTicks(value) {
  const values = shown().flatMap(run => run.steps.map(valueOf));
  ticks = [...new Set(values)].sort((a, b) => a - b);
  // An address has them rounded to a thousandth.
  Object.assign(state, {value, tick: Math.max(0, atMost(ticks, value + 6e-4) - 1)});
}

function address() {
  const parts = new URLSearchParams(state.own ? ownParts(state.own) : {});
  const {theme} = document.documentElement.dataset, value = ticks[state.tick] ?? 0;
  parts.set("run", state.run);
  if (state.beside) parts.set("beside", state.beside);
  if (!state.own || state.tick || state.clock === "step") {
    parts.set(state.clock, Math.round(1e3 * value) / 1e3);
  }
  if (state.slot) parts.set("slot", state.slot);
  if (state.stop !== null && !state.own) parts.set("stop", state.stop);
  if (state.stop !== null && !state.own && state.all) parts.set("all", 1);
  if (theme) parts.set("theme", theme);
  return "#" + parts;
}

function readAddress() {                 // and says which of it does not exist
  const parts = new URLSearchParams(location.hash.slice(1)), lost = [], {walk} = DATA;
  const stop = Number(parts.get("stop") ?? NaN), before = state.own;
  if (["dark", "light"].includes(parts.get("theme"))) setTheme(parts.get("theme"));
  Object.assign(state, {stop: walk[stop] ? stop : null, all: parts.has("all"), slot: null});
  setOwn(ownFrom(parts, lost));
  written = JSON.stringify(state.own);
  if (!state.own) lost.push(...[...parts.keys()].filter(name => !ADDRESS.includes(name)));
  const known = state.own ? Object.keys(LADDER) : names;
  const [run, beside = ""] = parts.has("run") || state.own
    ? [parts.get("run"), parts.get("beside")] : known;
  state.run = known.includes(run) ? run : state.own ? "paged" : names[0];
  state.beside = known.includes(beside) ? beside : "";
  state.clock = parts.has("ms") || (state.own && !parts.has("step")) ? "ms" : "step";
  for (const name of ["run", "beside"]) {
    const value = parts.get(name), now = state[name] ? `${state[name]} is shown` : "none is shown";
    if (value && value !== state[name]) lost.push(`${name}=${value} (${now})`);
  }
  if (parts.has("stop") && state.stop === null) lost.push(`stop=${parts.get("stop")}`);
  note(lost.length ? `In this link, ${lost.join(", ")} could not be read.` : "");
  if (!state.own && !parts.has("run") && walk.length) return showStop(state.stop ?? 0);
  setTicks(Number(parts.get(state.clock)) || 0);
  state.slot = slotNamed(parts.get("slot")) ? parts.get("slot") : null;
  build();
  if (state.own && !before && innerWidth <= 760) $("own").scrollIntoView();
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

function change(what) {                  // other runs, or another clock, at the same moment
  const {k} = views[0].now, value = ticks[state.tick];
  Object.assign(state, what, {slot: null});
  pointed = null;
  const {steps} = shown()[0];            // another run may have fewer
  const step = steps[Math.max(0, Math.min(k, steps.length - 1))];
  setTicks(what.clock && step ? valueOf(step) : value ?? 0);
  build();
}

function showStop(i) {                   // of the walk
  const {run, beside, clock, step, slot = null} = sceneOf(i);
  setOwn(null);
  Object.assign(state, {run, beside, clock, slot, stop: i, all: false});
  pointed = null;
  setTicks(valueOf(shown()[0].stepOf.get(step)));
  build();
  if (scrollY > $("walk").offsetTop) scrollTo(0, $("walk").offsetTop);
}

const visit = i => navigate(`stop=${i}`), openOwn = () => navigate(mine);

function answer(choice) {
  answered.set(state.stop, choice);
  showStop(state.stop);
}

// A slot's name is "view.pass.row.column". Its four numbers, if there is such a slot.
function slotNamed(name) {
  const parts = (name ?? "").split(".").map(Number), run = shown()[parts[0]];
  const there = parts.join(".") === name && parts.length === 4 && run && !run.computed
    && slotAt(run, ...parts.slice(1));
  return there ? parts : null;
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
  const main = $("views"), stop = inScene() ? DATA.walk[state.stop] : null;
  const scene = (state.own ? OWN : stop?.panels ?? ALL).filter(
    name => name !== "change" || !asking());
  views = shown().map((run, number) => ({run, number, panels: {}}));
  $("own").hidden = !state.own;          // first: hidden, it has no width
  $("other").hidden = views.length < 2;
  main.className = [views.length === 2 ? "two" : "one", stop || state.own ? "scene" : "",
                    asking() ? "asking" : ""].join(" ");
  main.replaceChildren();
  for (const name of scene) {
    for (const view of ONCE.includes(name) ? [views[0]] : views) {
      const panel = view.panels[name] = element("div");
      if (name === "sees") panel.ariaLive = "polite";
      if (state.own && name === "timeline") {
        (view.number ? $("other").lastElementChild : $("lines")).replaceChildren(panel);
      } else main.append(framed(name, view.run, panel));
    }
  }
  if (stop) {
    const look = (views[stop.look] ?? views[0]).panels[scene[0]] ?? main.firstChild.lastChild;
    look.parentNode.classList.add("look");
  }
  for (const [id, none] of [["run", []], ["beside", [""]]]) {
    $(id).replaceChildren(...[...none, ...state.own ? Object.keys(LADDER) : names].map(
      value => element("option", {value}, value || "nothing")));
  }
  fill();
  const list = $("walk").firstChild, marked = list.querySelector("[aria-current]");
  // On a phone the list scrolls sideways, and its first button stays.
  if (marked) list.scrollLeft = marked.offsetLeft - list.firstChild.offsetWidth - 8;
}

function framed(name, run, panel) {      // a panel's frame and title
  const title = PANELS[name], once = ONCE.includes(name), who = once ? "" : run.name;
  const note = !once ? who : name === "change" ? `step ${sceneOf(state.stop).step}`
    : `${state.own || inScene() ? "" : "these lengths on every stage, "}${DATA.clock}; `
      + "waits are the longest, in ms";
  return element("section", {className: "panel " + name, style: `--area: ${name}`,
                             ariaLabel: `${title}, ${who}`},
                 element("h2", {}, title, element("small", {}, " · " + note)), panel);
}

function fill() {                        // the frames that are there, with the runs as they are now
  views = shown().map((run, number) => (
    {run, number, panels: views[number].panels, rows: new Map()}));
  const {score, change} = views[0].panels;
  for (const view of views) {
    if (state.own) view.high = rowHigh(view.number);
    else if (views[1]) view.high = halfHigh(view.run);
    view.bare = state.own && !view.number && innerWidth > 760;
    if (view.panels.timeline) drawTimeline(view);
  }
  if (state.own) {
    drawOwn(views[0]);
    drawScores();
  } else score?.replaceChildren(scoreboardNow());
  if (change) drawChange(change, sceneOf(state.stop).step);
  drawLegend(views[0].panels);
  render();
}

function halfHigh({requests}) {          // of a row, in pixels, if two timelines shall be in sight
  const most = innerWidth <= 760 ? 11 : 13;
  return Math.max(1, Math.min(most, Math.floor((innerHeight - 440) / 2 / requests.length)));
}

function drawLegend({sees, timeline, change}) {   // of what can be seen now
  const has = name => shown().some(run => run.totals[name].at(-1) > 0);
  const kinds = {
    prefill: true, decode: true, recomputed: has("recomputed"), pad: has("pad_slots") || change,
    finished: has("finished_slots"), waiting: timeline,
    past: sees, new: sees, wrong: sees && shown().some(({xray}) => xray.wrong)};
  const words = {...DATA.names, past: "seen: key in the cache", new: "seen: key of this pass",
                 wrong: "seen, and must not be"};
  $("legend").replaceChildren(...Object.keys(kinds).filter(kind => kinds[kind]).map(
    kind => element("span", {}, element("i", {className: kind}), words[kind])));
}

function render() {                      // what depends on the moment
  for (const view of views) {
    view.now = momentOf(view.run, state.clock, ticks[state.tick] ?? 0);
    view.states = view.run.requests.map(request => stateOf(view.run, request, view.now));
    for (const name of Object.keys(view.panels)) DRAW[name]?.(view);
  }
  drawPointed();
  drawControls();
  if (state.own) views.forEach(sayOwn);
  writeAddress();
}

function scoreboardNow() {
  const [{run}] = views, {policy = "fcfs"} = run.knobs;
  if (!inScene()) {
    return scoreboard(run.would ??= wouldHave(run), null, {
      [run.stage]: policy === "fcfs" ? "recorded" : `recorded under ${policy}, here fcfs`});
  }
  const pick = run => navigate(
    String(new URLSearchParams({run, ms: ticks[state.tick], stop: state.stop, all: 1})));
  const scores = DATA.walk[state.stop].rows.map(name => [name, figuresOf(recorded(name))]);
  return scoreboard(Object.fromEntries(scores), pick);
}

const OURS = {ours: true};               // marks our entries of the history
let later = null, written = "";          // a timer; state.own, as the address has it

function writeAddress() {                // not at every step: browsers refuse 100 in 30 seconds
  clearTimeout(later);
  later = setTimeout(saveAddress, 400);
}

function saveAddress() {                 // a change of requests is an entry: Back takes it back
  clearTimeout(later);
  const own = JSON.stringify(state.own), news = own !== written;
  history[news ? "pushState" : "replaceState"](OURS, "", address());
  written = own;
}

function keepChange() {                  // an entry for it, before that of the address that came
  const foreign = location.hash;
  if (!state.own || JSON.stringify(state.own) === written || foreign === address()) return;
  clearTimeout(later);
  history.replaceState(OURS, "", address());
  history.pushState(OURS, "", foreign || "#");
}

function navigate(to) {                  // to what an address says; Back leads to where one was
  play(false);
  saveAddress();
  if (state.own) mine = address().slice(1);
  history.pushState(OURS, "", "#" + to);
  readAddress();
}

// --- controls ------------------------------------------------------------------------------------

let timer = null;                        // while it plays
const about = "how an LLM server batches requests, step by step; ms are "
  + (DATA.calculated ? "calculated for an A100" : "measured");

function drawControls() {
  const value = ticks[state.tick] ?? 0, end = ticks.at(-1) ?? 0, {stop} = state, {walk} = DATA;
  for (const id of ["run", "beside", "clock"]) $(id).value = state[id];
  $("now").textContent = state.clock === "step" ? `step ${value} of ${end}`
    : `step ${views[0].now.step}: ${ms(value).slice(0, -3)} of ${ms(end)}`;
  const [own, ...stops] = $("walk").querySelectorAll("button");
  const here = state.own ? own : stops[stop];
  for (const button of [own, ...stops]) button.ariaCurrent = button === here ? "step" : null;
  const on = state.own ? null : walk[stop];
  $("stop").hidden = !walk.length || Boolean(state.own);
  drawStop(on);
  $("controls").hidden = inScene();
  $("stages").hidden = names.length === 1 && !state.own;
  $("edit").hidden = Boolean(state.own);
  $("all").hidden = !on;
  $("all").textContent = state.all ? "this scene only" : "all panels";
  $("on").hidden = Boolean(state.own) || !walk.length;
  document.title = [state.own ? state.own.title || "your own requests" : on?.title ?? state.run,
                    "nanoBatch explorer"].join(" · ");
  $("about").textContent = state.own?.title || about;
  $("about").className = state.own?.title ? "title" : "";
  $("on").textContent = !on ? "guided walk" : walk[stop + 1]
    ? `next: ${stop + 2}/${walk.length}` : "your own requests";
}

function drawStop(on) {                  // its question, or its text
  const said = !on ? "" : [state.stop, asking(), answered.get(state.stop)].join();
  if ($("stop").dataset.said === said) return;
  $("stop").dataset.said = said;
  $("stop").className = on ? "on" : "";
  const {question, choices, right} = on?.ask ?? {}, choice = answered.get(state.stop);
  const before = choice === undefined || choice === null ? ""
    : choice === right ? "Right. " : `No, not “${choices[choice]}”. `;
  const again = element("button", {className: "again", onclick: () => {
    answered.delete(state.stop);
    showStop(state.stop);
  }}, "ask again");
  const buttons = (choices ?? []).map((text, i) => element(
    "button", {onclick: () => answer(i)}, text));
  $("stop").replaceChildren(...!on ? ["New to batching? Take the guided walk."]
    : !asking() ? [before, on.text, ...question ? [again] : []]
    : [question, div("choices", ...buttons, element(
      "button", {onclick: () => answer(null)}, "show me"))]);
}

// A tick takes 1 / speed seconds; on the clock in ms, that long on average.
function play(on) {
  clearTimeout(timer);
  timer = null;
  if (on && state.tick >= ticks.length - 1) go(0);
  const last = ticks.length - 1, each = 1000 / $("speed").value;
  const span = (ticks[last] - ticks[0]) / last;
  const next = () => {
    const share = state.clock === "ms" ? (ticks[state.tick + 1] - ticks[state.tick]) / span : 1;
    timer = setTimeout(() => {
      go(state.tick + 1);
      if (state.tick < last) next(); else play(false);
    }, each * share);
  };
  if (on && state.tick < last) next();
  $("play").textContent = timer ? "pause" : "play";
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  document.documentElement.style.colorScheme = theme || "light dark";
}

function turnTheme() {
  const {theme} = document.documentElement.dataset;
  const dark = theme === "dark" || (!theme && matchMedia("(prefers-color-scheme: dark)").matches);
  setTheme(dark ? "light" : "dark");
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
  const copy = node.cloneNode(true), canvases = [...copy.querySelectorAll("canvas")];
  node.querySelectorAll("canvas").forEach((canvas, i) => {
    const {width, height} = canvas.getBoundingClientRect();
    const style = `display: block; width: ${width}px; height: ${height}px`;
    canvases[i].replaceWith(element("img", {src: canvas.toDataURL(), style}));
  });
  const inputs = [...copy.querySelectorAll("input")];
  node.querySelectorAll("input").forEach((input, i) => {
    inputs[i].setAttribute("value", input.value);
  });
  copy.querySelectorAll(OFF_PICTURE).forEach(part => part.remove());
  return copy;
}

// The page as the text of an SVG, which holds its elements and its own style.
function drawingOf(width, height) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const frame = document.createElementNS("http://www.w3.org/2000/svg", "foreignObject");
  for (const node of [svg, frame]) {
    node.setAttribute("width", width);
    node.setAttribute("height", height);
  }
  const dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const theme = document.documentElement.dataset.theme ?? (dark ? "dark" : "light");
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
  const width = innerWidth, image = new Image();
  const probe = copyOf(document.body), holder = element("div", {style:
    `position: absolute; left: 0; top: 0; width: ${document.body.clientWidth}px;`
    + "visibility: hidden"}, ...probe.childNodes);
  document.body.append(holder);          // how high is it without its controls?
  const height = Math.ceil(holder.getBoundingClientRect().height) + 24;
  holder.remove();
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

const hold = name => { state.slot = name && state.slot !== name ? name : null; render(); };
const KEYS = {
  ArrowLeft: far => go(state.tick - far), ArrowRight: far => go(state.tick + far),
  Home: () => go(0), End: () => go(ticks.length - 1),
  " ": () => play(!timer), Escape: () => { pointed = null; hold(null); }};
const MOVES = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};

function onKey(event) {
  const {target, key} = event, grid = target.closest(".grid"), {activeElement} = document;
  const control = event.ctrlKey || event.metaKey || event.altKey;
  if (control || target.closest("select, input, textarea")) return;
  if (key === " " && target.closest("button, summary")) return;
  if (grid && MOVES[key]) {
    const here = slotNamed(pointed ?? state.slot);
    const [view, pass] = [Number(grid.dataset.view), Number(grid.dataset.pass)];
    const [row, column] = here && here[0] === view && here[1] === pass
      ? [here[2] + MOVES[key][0], here[3] + MOVES[key][1]] : [0, 0];
    const name = [view, pass, row, column].join(".");
    if (views[view].slots.has(name)) {
      pointed = name;
      views[view].slots.get(name).scrollIntoView({block: "nearest", inline: "nearest"});
      drawPointed();
    }
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

function nearest(event) {                // the slot that is meant: between two, or on a narrow one
  const grid = event.target.closest(".grid");
  if (!grid || event.target.dataset.slot) return event.target.dataset.slot ?? null;
  const {clientX, clientY} = event, far = node => {
    const {left, right, top, bottom} = node.getBoundingClientRect();
    return Math.hypot(clientX - (left + right) / 2, clientY - (top + bottom) / 2);
  };
  return [...grid.querySelectorAll(".slot")].reduce(
    (a, b) => far(b) < far(a) ? b : a).dataset.slot;
}

function seek(event) {                   // a press or drag on the timeline
  const view = views.find(view => view.box?.contains(event.target));
  if (!view || (event.type === "pointermove" && !event.buttons)) return;
  const value = view.valueAt(event.clientX - view.box.getBoundingClientRect().left);
  go(atMost(ticks, value) - (state.clock === "step"));
}

function begin() {
  const {weights, vocabulary, key, row, tile, overhead} = DATA.gpu;
  $("formula").textContent = `A pass reads the weights, ${ms(1e3 * (weights + vocabulary))}, and `
    + `the keys and values in sight, ${ms(1e6 * key)} for 1,000 tokens. Its arithmetic takes `
    + `${ms(1e3 * tile * row)}, and ${ms(1e5 * row)} for 100 slots. The time is the root of the `
    + `sum of both squares, and ${ms(1e3 * overhead)} of overhead.`;
  $("walk").querySelector("ol").append(element("li", {}, element(
    "button", {id: "mine", onclick: openOwn}, "try your own", element("span", {}, " requests"))),
    ...DATA.walk.length ? [element("li", {className: "soft"}, "or walk:")] : [],
    ...DATA.walk.map(({title}, i) => element(
      "li", {}, element("button", {onclick: () => visit(i)}, `${i + 1} ${title}`))));
  beginOwn();
  for (const id of ["run", "beside", "clock"]) $(id).onchange = () => change({[id]: $(id).value});
  $("speed").onchange = () => timer && play(true);
  $("theme").onclick = turnTheme;
  $("picture").onclick = savePicture;
  const keys = {first: "Home", back: "ArrowLeft", play: " ", next: "ArrowRight", last: "End"};
  for (const [id, key] of Object.entries(keys)) $(id).onclick = () => KEYS[key](1);
  $("on").onclick = () => {
    const next = (state.stop ?? -1) + 1;
    if (DATA.walk[next]) return visit(next);
    openOwn();
    $("mine").focus();
  };
  $("all").onclick = () => { state.all = !state.all; build(); };
  $("edit").onclick = () => navigate(ownOf(views[0].run, state.beside));
  document.addEventListener("keydown", onKey);

  const main = $("views"), slotOf = event => event.target.dataset.slot ?? null;
  main.addEventListener("pointerover", event => {
    if (event.pointerType === "touch" || slotOf(event) === pointed) return;
    pointed = slotOf(event);
    drawPointed();
  });
  main.addEventListener("mousedown", event => {   // keeps the focus
    if (slotOf(event)) event.preventDefault();
  });
  main.addEventListener("click", event => nearest(event) && hold(nearest(event)));
  for (const type of ["pointerdown", "pointermove"]) {
    for (const node of [main, $("bench")]) node.addEventListener(type, seek);
  }
  let wide = innerWidth, low = isLow();
  addEventListener("resize", () => {
    if (innerWidth !== wide || isLow() !== low) build();
    [wide, low] = [innerWidth, isLow()];
  });
  addEventListener("popstate", event => {
    play(false);
    if (!event.state) keepChange();      // a foreign address, not one of ours by Back
    readAddress();
  });
  addEventListener("hashchange", () => { if (location.hash !== address()) readAddress(); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", build);
  readAddress();
}

begin();
