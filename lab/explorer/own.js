// The visitor's own requests: what stands in the address, the controls, and the stages' runs of
// them, which schedule.js computes anew after each change. The one state is `state.own`:
//
//     {requests: [[prompt, answer, arrival in ms, 1 if it begins like the others], ...], title,
//      knobs}
//
// In an address, "24-40_180-12-50" are two requests; what is 0 at the end, or default, is left out.

const steps = (...parts) => parts.flatMap(
  ([from, to, by]) => Array.from({length: (to - from) / by + 1}, (_, i) => from + i * by));
const LENGTHS = steps([1, 32, 1], [36, 128, 4], [144, 512, 16], [576, 2048, 64]);
const KNOBS = {   // title, values, default, what it means, vLLM's name for it
  max_batch: ["max_batch", steps([1, 16, 1], [20, 40, 4]), 8, "requests that run at once",
              "max_num_seqs"],
  token_budget: ["token budget", [8, 16, 32, 64, 128, 256, 512, 1024, 2048], 64,
                 "tokens in a step, for the stages from chunked on", "max_num_batched_tokens"],
  memory: ["memory", steps([32, 512, 32], [640, 2048, 128], [2560, 16384, 512]), 2048,
           "tokens whose keys and values fit, for the stages from chunked on",
           "num_gpu_blocks × block_size"],
  page_size: ["page size", [1, 2, 4, 8, 16, 32, 64], 16, "tokens in a page of paged and prefix",
              "block_size"],
  max_new_tokens: ["max_new_tokens", [0, ...LENGTHS], 0,
                   "the limit that each request declares for its answer, or the answer's length if "
                   + "that is longer; chunked, interleaved and ragged reserve as much",
                   "max_tokens"],
  common: ["common beginning", [0, ...LENGTHS], 0, "tokens with which prompts marked ≡ begin",
           ""]};
const TITLE = 80;                        // letters
const PRESETS = {   // name: [an address, what to look at, in figures of the scoreboard]
  "mixed": [
    "own=24-40_60-24_12-60_120-30-40_36-16-80_200-24-120_16-48-160_48-32-200&run=naive",
    ({naive, ragged}) => `Prompts and answers of all lengths. In naive ${share(naive)} of the slots `
      + "are useful: the others are pads (grey) and finished rows (red). In ragged "
      + `${share(ragged)} are.`],
  "a long prompt": [
    "own=16-60_24-60_20-60_32-60_1024-20-100_20-30-150&token_budget=128&memory=8192"
      + "&run=dynamic&beside=ragged",
    ({dynamic, chunked, ragged}) => "E has 1,024 tokens. In dynamic nobody gets a token for "
      + `${ms(dynamic.next)} (red frames), in chunked for ${ms(chunked.next)}, in ragged for `
      + `${ms(ragged.next)}: “worst gap” in the scoreboard.`],
  "one system prompt": [
    "own=220-30-0-1_232-24-0-1_212-36-40-1_240-20-80-1_224-28-120-1_60-30-160&common=192"
      + "&memory=1024&run=prefix&beside=paged",
    ({paged, prefix}) => "Five prompts begin with the same 192 tokens (≡). Prefix computes them "
      + `once: a first token comes after ${ms(prefix.first)} at most, in paged after `
      + `${ms(paged.first)}; and it runs ${prefix.at_once} requests at once, not ${paged.at_once}.`],
  "little memory": [
    "own=40-30_60-40_52-36_44-50_60-24_48-44_56-30_40-36&memory=512&max_new_tokens=128&run=paged"
      + "&beside=ragged",
    ({paged, ragged}) => `Memory for 512 tokens, and ragged reserves 128 for each answer: `
      + `${ragged.at_once} requests at once, ${rounded(ragged.speed)} tokens/s. Paged gives pages `
      + `as answers grow: ${paged.at_once} at once, ${rounded(paged.speed)} tokens/s.`]};
const share = ({useful}) => `${Math.round(100 * useful)}%`;
const MOST = 40;                         // requests
const OF_A_FILE = "This page is a file on your computer, so only what follows its address is "
  + "copied. Others put it behind the address of their copy, or into its “paste requests”: ";
const HEAVY = 5000;                      // tokens of answers, from which on computing is announced

// --- the state -----------------------------------------------------------------------------------

const planned = new Map();               // stage -> its run of state.own
const rows = [], knobs = {};             // controls of each request; of each knob
let mine = PRESETS.mixed[0];             // the address of the requests that were shown last
let soon = null;                         // the next frame, if it shall redraw
let computing = null;                    // a timer: the next stage of the scoreboard

const LIMITS = [["a prompt's tokens", 1, 8192], ["an answer's tokens", 1, 2048],
                ["an arrival in ms", 0, 1e5]];
const isLength = (n, least, most) => Number.isInteger(n) && n >= least && n <= most;

function setOwn(own) {
  state.own = own;
  forget();
}

function forget() {                      // what was computed of other requests
  planned.clear();
  clearTimeout(computing);
}

// How many tokens all answers have: what computing them takes.
const answers = () => state.own.requests.reduce((sum, [, answer]) => sum + answer, 0);

// The requests of an address; null if it has none; one, if none is right. lost: what cannot be read
// is added to it.
function ownFrom(parts, lost) {
  if (!parts.has("own")) return null;
  const texts = parts.get("own").split("_"), left = [];
  const own = {requests: texts.map((text, r) => {
    const [prompt, answer, arrival = 0, shares = 0] = text.split("-").map(Number);
    const one = [prompt, answer, arrival, shares ? 1 : 0];
    const right = r < MOST && LIMITS.every(([, ...limits], k) => isLength(one[k], ...limits));
    if (!right) left.push(`“${text}”`);
    return right && one;
  }).filter(Boolean)};
  if (left.length) lost.push(`${plural(left.length, "request")} (${left.slice(0, 3).join(", ")})`);
  own.title = (parts.get("title") ?? "").slice(0, TITLE);
  const known = ["own", "title", "run", "beside", "ms", "step", "theme", ...Object.keys(KNOBS)];
  lost.push(...[...parts.keys()].filter(name => !known.includes(name)));
  for (const [name, [title, values, usual]] of Object.entries(KNOBS)) {
    const value = Number(parts.get(name) ?? usual);
    own[name] = isLength(value, values[0], values.at(-1)) ? value : usual;
    if (own[name] !== value) lost.push(`${title}=${parts.get(name)} (now ${usual})`);
  }
  return own.requests.length ? own : {...own, requests: [[24, 40, 0, 0]]};
}

function ownParts({requests, title, ...others}) {   // for an address
  const list = requests.map(request => request.join("-").replace(/(-0)+$/, "")).join("_");
  return {...title ? {title} : {}, own: list, ...Object.fromEntries(
    Object.entries(others).filter(([name, value]) => value !== KNOBS[name][2]))};
}

// The address of a recorded run's lengths; they arrive when they did on the GPU's clock.
function ownOf(run, beside) {
  const {max_batch = 8, token_budget = 64, page_size = 16} = run.knobs, {requests} = run;
  const when = computed("ragged", lengthsOf(requests), {max_batch, token_budget}).requests;
  const prompts = requests.map(({prompt}) => prompt), shared = prompts.map(
    prompt => largest(prompts.map(other => other === prompt ? 0 : alike(prompt, other))));
  const common = largest(shared) > page_size ? largest(shared) : 0;
  const rooms = requests.map(({prompt, limit}) => (
    page_size * Math.ceil((prompt.length + limit - 1) / page_size)));
  const memory = limitOf(run.knobs) ?? Math.max(KNOBS.memory[2],   // else enough for whoever runs
    rooms.sort((a, b) => b - a).slice(0, max_batch).reduce((a, b) => a + b));
  const list = requests.map(({prompt, generated}, r) => [
    prompt.length, generated.length, Math.round(when[r].arrived),
    common && shared[r] === common ? 1 : 0]);
  const own = {requests: list.slice(0, MOST), max_batch, token_budget, page_size, common,
               memory: Math.min(memory, KNOBS.memory[1].at(-1))};
  const stages = {run: run.stage, beside: RUNS.get(beside)?.stage};
  const known = Object.entries(stages).filter(
    ([, name]) => LADDER[name]);
  return String(new URLSearchParams({...ownParts(own), ...Object.fromEntries(known)}));
}

function ownRun(stage) {
  if (!planned.has(stage)) {
    const {requests, title, memory, max_new_tokens, common, ...limits} = state.own;
    const load = requests.map(([prompt, answer, arrival, shares], r) => ({
      prompt, answer, arrival, limit: Math.max(answer, max_new_tokens),
      equal: requests.slice(0, r).map(
        other => shares && other[3] ? Math.min(common, prompt, other[0]) : 0)}));
    const pages = Math.floor(memory / limits.page_size);
    planned.set(stage, computed(
      stage, load, {...limits, in_ms: true, max_kv_tokens: memory, pages}));
  }
  return planned.get(stage);
}

// --- changes -------------------------------------------------------------------------------------

function edit(what) {
  note("");
  what(state.own);
  soon ??= requestAnimationFrame(redraw);
}

function redraw() {                      // at most once in a frame
  soon = null;
  if (!state.own) return;
  forget();
  if (answers() <= HEAVY) return redrawNow();
  // Many tokens take a while: first the page says so, and computes when the bar is let go.
  note(`Computing ${plural(state.own.requests.length, "request")} with `
       + `${plural(answers(), "token")} of answers …`, "soft");
  computing = setTimeout(() => {
    redrawNow();
    note("");
  }, 250);
}

function redrawNow() {
  setTicks(state.value);
  fill();
}

const scoreOf = stage => planned.has(stage) || answers() <= HEAVY ? figuresOf(ownRun(stage))
  : undefined;

// The figures that are there. Of many tokens the others follow, a stage at a time.
function scoresSoFar() {
  const scores = Object.fromEntries(Object.keys(LADDER).map(stage => [stage, scoreOf(stage)]));
  const missing = Object.keys(LADDER).find(stage => scores[stage] === undefined);
  clearTimeout(computing);
  if (missing) {
    computing = setTimeout(() => {
      if (!state.own) return;
      ownRun(missing);
      drawScores();
    }, 30);
  }
  return scores;
}

// --- controls ------------------------------------------------------------------------------------

// A native range input, whose positions are indices of a table of values and whose face is a bar;
// and a native number, which takes what lies between them.
function bar(name, kind, values, set, most = values.at(-1)) {
  const input = element("input", {type: "range", min: 0, max: values.length - 1, ariaLabel: name});
  const exact = element("input", {type: "number", min: values[0], max: most, required: true,
                                  ariaLabel: `${name}, as a number`});
  input.oninput = () => edit(() => set(values[input.value]));
  exact.oninput = () => exact.checkValidity() && edit(() => set(Number(exact.value)));
  exact.onchange = () => {               // a value that is refused does not stay in its field
    if (exact.checkValidity()) return;
    const refused = exact.value, [least, greatest] = [exact.min, exact.max].map(Number);
    exact.value = shown;
    note(`${name}: a whole number from ${number(least)} to ${number(greatest)}, please, not `
         + `${refused || "nothing"}. It stays ${number(shown)}.`);
  };
  let shown = null;
  return {node: element("label", {className: "length " + kind}, input, exact), show(value) {
    shown = value;
    input.value = Math.max(0, atMost(values, value) - 1);
    input.ariaValueText = number(value);
    input.style.setProperty("--share", input.value / (values.length - 1));
    if (document.activeElement !== exact) exact.value = value;
  }};
}

function row(r) {                        // a request's controls; r: its number
  const name = nameOf(r), set = (i, value) => { state.own.requests[r][i] = value; };
  const prompt = bar(`${name}: prompt`, "prefill", LENGTHS, n => set(0, n), LIMITS[0][2]);
  const answer = bar(`${name}: answer`, "decode", LENGTHS, n => set(1, n));
  const shares = element("button", {
    title: "begins with the common beginning", ariaLabel: `${name}: begins like the others`,
    onclick: () => edit(own => {
      own.requests[r][3] ^= 1;
      own.common ||= 64;
    })}, "≡", element("small", {ariaHidden: "true"}, "alike"));
  const out = element("button", {
    className: "out", ariaLabel: `remove ${name}`, title: `remove ${name}`, onclick: () => {
      edit(own => own.requests.splice(r, 1));
      if (!state.own.requests[r]) $("rows").querySelectorAll(".out")[r - 1].focus();
    }}, "×", element("small", {ariaHidden: "true"}, "remove"));
  const input = element("input", {type: "range", min: 0, ariaLabel: `${name}: arrival, ms`});
  input.oninput = () => {
    state.held ??= views[0].end;         // while it is dragged, the axis stays
    edit(() => set(2, Number(input.value)));
  };
  input.onchange = () => edit(() => { state.held = null; });
  const output = element("output");
  const arrival = element("label", {className: "arrival"}, input, output);
  prompt.node.prepend(element("small", {ariaHidden: "true"}, "prompt"));   // on a phone
  answer.node.prepend(element("small", {ariaHidden: "true"}, "answer"));
  const node = element("div", {className: "row", ariaLabel: `request ${name}`}, bold(name),
                       prompt.node, answer.node, shares, out, arrival);
  node.setAttribute("role", "group");
  return {node, show([tokens, longest, at, common], end) {
    prompt.show(tokens);
    answer.show(longest);
    input.max = Math.max(end, at);
    input.value = at;
    input.ariaValueText = output.textContent = `${number(at)} ms`;
    input.disabled = state.clock === "step";
    shares.ariaPressed = String(Boolean(common));
    out.disabled = state.own.requests.length === 1;
  }};
}

function beginOwn() {
  const preset = name => element("button", {onclick: () => navigate(PRESETS[name][0])}, name);
  const box = element("textarea", {rows: 4, ariaLabel: "requests", placeholder: [
    "500 60", "40, 120, 25", '{"prompt": 300, "answer": 80, "arrival": 25, "shared": true}'
  ].join("\n")});
  const said = element("span", {className: "soft", role: "status"});
  const paste = element("details", {className: "paste"}, element("summary", {}, "paste requests"),
    soft("A line for each request: the lengths of its prompt and its answer, in tokens, and, if "
         + "not 0, its arrival in ms and whether it begins like the others (1). Or JSON. Or a "
         + "link, or the part of one from # on."), box,
    element("button", {onclick: () => {
      const [, link] = /^[^\s#]*#(\S+)$/.exec(box.value.trim()) ?? [];
      said.textContent = "";
      if (link) return navigate(link);
      try {
        const requests = parsed(box.value);
        edit(own => {
          own.requests = requests;
          if (requests.some(([, , , shares]) => shares)) own.common ||= 64;
        });
        said.textContent = `${plural(requests.length, "request")}.`;
      } catch (error) {
        said.textContent = error.message;
      }
    }}, "use these"), said);
  const title = element("input", {
    id: "title", maxLength: TITLE, placeholder: "title of the link", ariaLabel: "title of the link",
    oninput: () => edit(own => { own.title = title.value; })});
  const copy = element("button", {id: "copy", onclick: () => copyLink(copy)}, "copy link");
  $("presets").append("Begin with:", ...Object.keys(PRESETS).map(preset), title, copy);
  $("pasting").append(paste);
  for (const [name, [title, values, , meaning, theirs]] of Object.entries(KNOBS)) {
    const knob = bar(`${title}: ${meaning}`, "knob", values, n => { state.own[name] = n; });
    knob.node.prepend(element("span", {title: meaning}, title, element("small", {}, theirs)));
    knobs[name] = knob;
    $("knobs").append(knob.node);
  }
  $("more").onclick = () => edit(({requests}) => requests.push([...requests.at(-1)]));
}

// Whoever has published this page says where: pages.yml fills it in. A copy on a computer knows it.
const published = () => document.querySelector("meta[name=published]").content;

async function copyLink(button) {
  const here = location.href.split("#")[0], ofFile = location.protocol === "file:";
  const page = ofFile ? published() : here, link = page + address();
  await navigator.clipboard?.writeText(link).catch(() => {});
  if (ofFile) note((page ? "" : OF_A_FILE) + link, "soft");
  button.textContent = "copied";
  setTimeout(() => { button.textContent = "copy link"; }, 1500);
}

// Requests in lines. Error with a line that says what is wrong.
function parsed(text) {
  let lines = text.split("\n").map((line, i) => ({line: line.trim(), where: `line ${i + 1}`}));
  lines = lines.filter(({line}) => line);
  if (lines.length && isHead(lines[0].line)) lines = lines.slice(1);
  if (!lines.length || lines.length > MOST) {
    throw Error(`1 to ${MOST} requests, please; there are ${lines.length} lines`);
  }
  return lines.map(({line, where}) => {
    const one = line.startsWith("{") ? fromJSON(line, where) : fromWords(line, where);
    for (const [k, [what, least, most]] of LIMITS.entries()) {
      if (isLength(one[k], least, most)) continue;
      throw Error(`${where}: ${what} must be a whole number from ${least} to ${number(most)}, `
                  + `not ${one[k]}`);
    }
    return [...one.slice(0, 3), one[3] ? 1 : 0];
  });
}

// The fields of a line, without the quotation marks around them.
const fields = line => line.split(/[\s,;]+/).map(field => field.replace(/^["']|["']$/g, ""));
const isNumber = field => field !== "" && Number.isFinite(Number(field));

function isHead(line) {                  // of a table: names, and no number
  return !line.startsWith("{") && !fields(line).some(isNumber)
    && fields(line).length > 1;
}

function fromWords(line, where) {            // prompt, answer, arrival, whether it begins like others
  const words = fields(line).filter(field => field !== ""), odd = words.find(
    word => !isNumber(word));
  if (odd !== undefined) throw Error(`${where}: “${odd}” is no number`);
  if (words.length < 2 || words.length > 4) {
    throw Error(`${where}: two to four numbers, not “${line}”`);
  }
  const [prompt, answer, arrival = 0, shared = 0] = words.map(Number);
  return [prompt, answer, arrival, shared];
}

const NAMES = ["prompt", "answer", "arrival", "shared"];

function fromJSON(line, where) {
  let one;
  try {
    one = JSON.parse(line);
  } catch {
    throw Error(`${where} is not JSON`);
  }
  const unknown = Object.keys(one).find(name => !NAMES.includes(name));
  if (unknown !== undefined) {
    throw Error(`${where}: “${unknown}” is unknown; there are ${NAMES.join(", ")}`);
  }
  for (const name of ["prompt", "answer"]) {
    if (!(name in one)) throw Error(`${where}: “${name}” is missing`);
  }
  const {prompt, answer, arrival = 0, shared = 0} = one;
  return [...[prompt, answer, arrival].map(numberOf), Number(shared)];
}

// A number, also one in quotation marks; anything else stays, and is named in the error.
const numberOf = value => typeof value === "string" && isNumber(value) ? Number(value) : value;

// --- drawing -------------------------------------------------------------------------------------

function rowHigh(number) {               // of a timeline, in pixels: of the first as its controls
  const rows = state.own.requests.length;
  if (innerWidth <= 760) return Math.max(4, Math.min(14, Math.floor(130 / rows)));
  if (number) return 11;
  return isLow() ? 22 : 24;              // as .row in page.css
}

function drawOwn({wide}) {               // the controls show the state
  const {requests} = state.own;
  while (rows.length < requests.length) rows.push(row(rows.length));
  const there = $("rows").children;      // the others stay where they are: one may have the focus
  while (there.length > requests.length) there[there.length - 1].remove();
  while (there.length < requests.length) $("rows").append(rows[there.length].node);
  $("own").style.setProperty("--wide", wide - 2 + "px");
  const end = state.held ?? largest(shown().map(endOf));
  requests.forEach((request, r) => rows[r].show(request, end));
  for (const name of Object.keys(KNOBS)) knobs[name].show(state.own[name]);
  $("more").disabled = requests.length === MOST;
  if (document.activeElement !== $("title")) $("title").value = state.own.title ?? "";
}

function ownScores() {                   // {stage: its figures}, of all
  return Object.fromEntries(Object.keys(LADDER).map(stage => [stage, figuresOf(ownRun(stage))]));
}

function pickOwn(run) {                  // or twice the same
  change(run === state.beside ? {run, beside: state.run} : {run});
}

function ownScoreboard(scores) {
  const marks = {[state.beside]: "beside it", [state.run]: "shown"};
  return scoreboard(scores, run => {
    pickOwn(run);
    $("views").querySelector(".scores [aria-pressed=true]").focus();   // as it was
  }, marks);
}

// Its most asked figures, beside the timelines: in sight while a bar is moved.
function fewScores(scores) {
  const keys = ["speed", "first", "next"];
  const heads = keys.map(key => element("th", {scope: "col", title: SCORES[key][2]},
                                        SCORES[key][0].replace(", ms", "")));
  const lines = Object.entries(scores).map(([name, score]) => {
    const shown = [state.run, state.beside].includes(name);
    const button = element("button", {ariaPressed: String(shown), onclick: () => {
      pickOwn(name);
      $("few").querySelectorAll("button")[Object.keys(LADDER).indexOf(name)].focus();
    }}, name);
    const cells = keys.map(key => element("td", {}, score ? SCORES[key][1](score[key])
      : score === undefined ? "…" : "–"));
    return element("tr", {}, element("th", {scope: "row"}, button), ...cells);
  });
  return element("table", {}, element("tr", {}, element("th", {scope: "col"}, "stage"), ...heads),
                 ...lines);
}

function drawScores() {
  const scores = scoresSoFar(), {score} = views[0].panels;
  score?.replaceChildren(ownScoreboard(scores));
  $("few").replaceChildren(fewScores(scores));
  $("looks").textContent = lookAt(scores);
}

function lookAt(scores) {                // of the preset whose requests these are
  const here = JSON.stringify(ownParts(state.own));
  const [, words] = Object.values(PRESETS).find(([address]) => here === JSON.stringify(
    ownParts(ownFrom(new URLSearchParams(address), [])))) ?? [];
  return words && Object.values(scores).every(Boolean) ? words(scores) : "";
}

function sayOwn(view) {                  // the plan, and what waits for what
  const {run, now, states, number} = view;
  const queue = run.requests.map((request, r) => ({...request, kind: states[r].kind})).filter(
    ({kind}) => ["waiting", "preempted"].includes(kind)).sort((a, b) => a.arrived - b.arrived);
  const names = queue.map(({name, kind}) => name + (kind === "preempted" ? " (preempted)" : ""));
  if (names.length > 8) names.splice(8, Infinity, `and ${names.length - 8} more`);
  const wait = !names.length || !now.passes.length ? ""
    : ` ${names.join(" ")} wait${names.length > 1 ? "" : "s"} for ${waitsFor(run, now, queue[0])}.`;
  const never = run.requests.filter(({refused}) => refused);
  const others = never.slice(1).map(({name}) => name).join(" ");
  const misfits = never.length ? ` ${never[0].name} can never run: ${never[0].refused}`
    + `${others && `; nor can ${others}`}.` : "";
  const plan = never.length === run.requests.length ? "nothing runs."
    : sayPlan(view, partsNow(view));
  const who = state.beside ? `${run.name}, step` : "Step";
  const text = `${who} ${now.step}: ${plan}${wait}${misfits}`;
  const node = number ? $("other").firstElementChild : $("said");
  if (node.textContent !== text) node.textContent = text;
}

const FIRST = {unbatched: "a turn", naive: "the batch", dynamic: "a place"};

function waitsFor(run, now, {name, prompt, limit, steps}) {   // the first in the queue
  const {knobs, passes, pool} = run, [first] = now.passes, reserved = passes.reserved[first];
  const set = state.own.max_batch, more = knobs.max_batch < set
    ? `: more than ${knobs.max_batch} at once might not fit into the memory` : "";
  if (FIRST[run.name]) return FIRST[run.name] + more;
  if (preempts(run, now)) return "the next step: none is admitted in a step that preempts";
  if (passes.at_once[first] === knobs.max_batch) return "a place";
  if (tokensIn(run, now) === knobs.token_budget) return "the token budget";
  const known = prompt.length + atMost(steps, now.step);   // when it is admitted, and preempted
  const [need, free, unit] = pool
    ? [Math.ceil(known / pool.page_size), pool.pages - reserved / pool.page_size, "page"]
    : [prompt.length + limit - 1, knobs.max_kv_tokens - reserved, "token"];
  const does = run.name === "prefix" ? "needs at most" : pool ? "needs" : "would reserve";
  const less = pool ? "" : " (the last one of its answer needs none)";
  return `memory: ${name} ${does} ${plural(need, unit)}${less}, ${number(free)} free`;
}

function preempts({passes, requests}, {step, passes: [first]}) {   // whoever is done leaves, too
  return Object.entries(passes.room[first]).some(([r, room]) => room === null
    && atMost(requests[r].steps, step - 1) < requests[r].generated.length);
}
