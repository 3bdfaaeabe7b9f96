// The twin: what the ladder's stages do with a load, computed once more in a browser. Which tokens
// are in which pass depends on lengths alone, so there is no model here, and no token:
//
//     simulate("paged", [{prompt: 20, answer: 5}, {prompt: 9, answer: 3, arrival: 2}],
//              {max_batch: 8, token_budget: 32, pages: 26, page_size: 16}, gpu)
//
// A stage is a generator that yields a batch where the Python file makes a forward pass. Names and
// order are those of the Python files, which say why; tests/test_twin.py compares every pass of
// random loads. Out of scope: the policies of beyond/fairness.py, ragged's "mask", prepacking.

const sum = values => values.reduce((a, b) => a + b, 0);
const largest = values => values.reduce((a, b) => Math.max(a, b), 0);

// --- request.py ----------------------------------------------------------------------------------

class Request {
  // prompt, answer, limit: numbers of tokens; limit: of the longest answer that it may get
  // shared: so many of its first tokens are those with which the other requests begin
  // tokens: ids of prompt and answer, if they are known; then these say what is shared
  constructor({prompt, answer, limit = answer, arrival = 0, shared = 0, tokens = null}, number) {
    Object.assign(this, {number, prompt, answer, limit, arrival, shared, tokens, refused: ""});
    Object.assign(this, {computed: 0, generated: 0, reached: 0, block_table: null});
    Object.assign(this, {page_hashes: [], token_steps: [], token_times: [], table: null, room: 0,
                         runs: false});
  }
  get todo() { return this.prompt + this.generated - this.computed; }
  get kv_tokens() { return this.prompt + this.limit - 1; }
  get finished() { return this.generated === this.answer; }
}

const requests_due = plan => plan.filter(([request, n]) => n === request.todo).map(part => part[0]);

function advance(plan) {
  const sampled = requests_due(plan);
  for (const [request, n] of plan) request.computed += n;
  for (const request of sampled) request.generated += 1;
}

class Clock {   // arrivals are steps, or with `in_ms` milliseconds of this clock
  constructor(in_ms) { Object.assign(this, {in_ms, now: 0}); }
  arrived(request, step) { return request.arrival <= (this.in_ms ? this.now : step); }
  next_step(step, request) {             // nothing is left to do before it arrives
    if (!this.in_ms) return Math.max(step, request.arrival);
    this.now = Math.max(this.now, request.arrival);
    return step;
  }
}

// --- scheduler.py --------------------------------------------------------------------------------

class Scheduler {
  constructor(requests, {max_batch, token_budget, max_kv_tokens}, clock) {
    Object.assign(this, {max_batch, token_budget, max_kv_tokens: max_kv_tokens ?? Infinity, clock});
    Object.assign(this, {waiting: [], running: [], waits_for: ""});
    for (const request of requests) this.add(request);
  }
  add(request) {                         // Python refuses the whole run
    if (request.kv_tokens <= this.max_kv_tokens) this.waiting.push(request);
    else request.refused = `${request.kv_tokens} KV tokens, there are ${this.max_kv_tokens}`;
  }
  schedule(step) {
    this.admit(step);
    const plan = this.share_budget();
    if (!plan.length) throw Error(`step ${step}: nothing can go on`);
    return plan;
  }
  admit(step) {                          // waits_for: what keeps the first in the queue out
    let todo = sum(this.running.map(request => request.todo));
    while (this.running.length < this.max_batch && todo < this.token_budget) {
      this.waits_for = "memory";
      if (!this.arrived(step) || !this.grant_room(this.waiting[0])) return;
      this.running.push(this.waiting.shift());
      todo += this.running.at(-1).todo;
    }
    this.waits_for = this.running.length < this.max_batch ? "the token budget" : "a place";
  }
  share_budget() {
    const plan = this.running.filter(request => request.todo === 1).map(request => [request, 1]);
    let budget = this.token_budget - plan.length;
    for (const request of this.running.filter(request => request.todo > 1)) {
      if (budget > 0) plan.push([request, Math.min(request.todo, budget)]);
      budget -= request.todo;
    }
    return plan;
  }
  update(plan) {
    advance(plan);
    for (const request of this.running.filter(request => request.finished)) this.free(request);
    this.running = this.running.filter(request => !request.finished);
  }
  get busy() { return this.waiting.length + this.running.length > 0; }
  arrived(step) { return this.waiting.length > 0 && this.clock.arrived(this.waiting[0], step); }
  next_step(step) {
    return this.running.length ? step : this.clock.next_step(step, this.waiting[0]);
  }
  grant_room(request) {
    const reserved = sum(this.running.map(other => other.kv_tokens));
    return reserved + request.kv_tokens <= this.max_kv_tokens;
  }
  free() {}
}

// --- paging.py -----------------------------------------------------------------------------------

class Pages {
  constructor(number, size) {            // a Set keeps the order
    Object.assign(this, {number, size, free_queue: new Set(Array(number).keys())});
    this.counts = {preemptions: 0, shared_pages: 0, saved_tokens: 0, evicted_pages: 0};
  }
  needed(tokens) { return Math.ceil(tokens / this.size); }
  take() {                               // Python: popleft, popitem
    const [page] = this.free_queue;
    this.free_queue.delete(page);
    return page;
  }
  allocate(table, number) { for (let i = 0; i < number; i++) table.push(this.take()); }
  free(table) { for (const page of table) this.free_queue.add(page); }
}

function pool_size(requests, {max_batch, page_size, pages = null}) {
  const needed = requests.map(({kv_tokens}) => Math.ceil(kv_tokens / page_size));
  if (pages !== null) return Math.min(pages, sum(needed));
  return sum(needed.sort((a, b) => b - a).slice(0, max_batch));
}

class PagedScheduler extends Scheduler {
  constructor(requests, knobs, clock, Kind = Pages) {
    const number = pool_size(requests, knobs), max_kv_tokens = number * knobs.page_size;
    super(requests, {...knobs, max_kv_tokens}, clock);
    this.pages = new Kind(number, knobs.page_size);
  }
  schedule(step) {
    for (const request of [...this.running]) {
      const need = this.pages.needed(request.computed + request.todo);
      while (this.running.includes(request) && request.block_table.length < need) {
        if (this.pages.free_queue.size) this.pages.allocate(request.block_table, 1);
        else this.preempt(this.running.at(-1));
      }
    }
    return super.schedule(step);
  }
  preempt(request) {
    this.running.pop();
    this.free(request);
    request.computed = 0;
    this.waiting.unshift(request);
    this.pages.counts.preemptions += 1;
  }
  grant_room(request) {
    const need = this.pages.needed(request.todo);
    if (need > this.pages.free_queue.size) return false;
    request.block_table = [];
    this.pages.allocate(request.block_table, need);
    return true;
  }
  free(request) {
    this.pages.free(request.block_table);
    request.block_table = null;
  }
}

// --- generate_prefix.py --------------------------------------------------------------------------

// What tells a full page's tokens from others: their ids, or their place in a shared beginning.
function content({number, shared, tokens}, start, end) {
  if (tokens) return tokens.slice(start, end).join(" ");
  return end <= shared ? `shared ${end}` : `${number}: ${end}`;
}

class PrefixPages extends Pages {
  constructor(number, size) {
    super(number, size);
    Object.assign(this, {ref_count: Array(number).fill(0), cached: new Map(), hash_of: new Map()});
    this.names = new Map();              // of what was hashed -> its hash, a number
  }
  page_hash(request, i) {                // of its i-th page and all before it, computed once
    const known = request.page_hashes, {size, names} = this;
    while (known.length <= i) {
      const start = known.length * size, tokens = content(request, start, start + size);
      const chained = `${known.at(-1) ?? ""} / ${tokens}`;
      if (!names.has(chained)) names.set(chained, names.size);
      known.push(names.get(chained));
    }
    return known[i];
  }
  get in_order() {                       // the cached pages of the free queue
    return [...this.free_queue].filter(page => this.hash_of.has(page));
  }
  find(request, last) {                  // of its full pages before position `last`
    const found = [];
    for (let i = 0; (i + 1) * this.size <= last; i++) {
      const page = this.cached.get(this.page_hash(request, i));
      if (page === undefined) break;
      found.push(page);
    }
    return found;
  }
  share(table, pages) {
    for (const page of pages) {
      this.free_queue.delete(page);
      this.ref_count[page] += 1;
      table.push(page);
    }
  }
  allocate(table, number) {
    for (let i = 0; i < number; i++) {
      const page = this.take();
      if (this.cached.delete(this.hash_of.get(page))) this.counts.evicted_pages += 1;
      this.hash_of.delete(page);
      this.share(table, [page]);
    }
  }
  cache(page, hash) {
    if (this.cached.has(hash)) return;
    this.cached.set(hash, page);
    this.hash_of.set(page, hash);
  }
  free(table) {
    for (const page of [...table].reverse()) {
      this.ref_count[page] -= 1;
      if (!this.ref_count[page]) this.free_queue.add(page);
    }
  }
}

class PrefixScheduler extends PagedScheduler {
  constructor(...load) { super(...load, PrefixPages); }
  grant_room(request) {
    const {pages} = this, found = pages.find(request, request.todo - 1);
    const more = pages.needed(request.todo) - found.length;
    const free = found.filter(page => pages.free_queue.has(page)).length;
    if (more + free > pages.free_queue.size) return false;
    Object.assign(request, {block_table: [], computed: found.length * pages.size});
    pages.share(request.block_table, found);
    pages.allocate(request.block_table, more);
    pages.counts.shared_pages += found.length;
    pages.counts.saved_tokens += request.computed;
    return true;
  }
  update(plan) {
    const {size} = this.pages;
    for (const [request, n] of plan) {
      const full = Math.floor((request.computed + n) / size);
      for (let i = Math.floor(request.computed / size); i < full; i++) {
        this.pages.cache(request.block_table[i], this.pages.page_hash(request, i));
      }
    }
    super.update(plan);
  }
}

// --- layouts: the tensor's shape; the scores that attention computes, the keys that it reads, and
// --- those that it copies, of all rows. (A GPU reads pages through the table, and copies none.)

const n_of = ([, n]) => n, first_of = ([{computed}]) => computed;
const end_of = ([{computed}, n]) => computed + n;

function alone([part]) {
  return {shape: [1, n_of(part)], scores: n_of(part) * end_of(part), keys: end_of(part), copied: 0};
}

function static_batch({length: B}, start, end) {
  return {shape: [B, end - start], scores: B * (end - start) * end, keys: B * end, copied: 0};
}

function rectangle(plan) {
  const B = plan.length, T = largest(plan.map(n_of)), P = largest(plan.map(first_of));
  return {shape: [B, T], scores: B * T * (P + T), keys: B * (P + T), copied: B * P + B * (P + T)};
}

function flat(plan) {
  let N = 0, scores = 0, keys = 0;
  for (const part of plan) {
    N += n_of(part);
    keys += end_of(part);
    scores += n_of(part) * end_of(part);
  }
  return {shape: [N], scores, keys, copied: 0};
}

// --- generate_*.py -------------------------------------------------------------------------------

function* unbatched(waiting, knobs, clock) {
  let step = 0;
  for (const request of [...waiting]) {
    step = clock.next_step(step, request);
    waiting = waiting.slice(1);
    for (; !request.finished; step++) {
      const plan = [[request, request.todo]];
      yield {step, plan, running: [request], waiting, waits_for: "its turn", cost: alone(plan)};
      advance(plan);
    }
  }
}

function* naive(waiting, {max_batch}, clock) {
  let step = 0;
  while (waiting.length) {
    step = clock.next_step(step, waiting[0]);
    const running = waiting.filter(one => clock.arrived(one, step)).slice(0, max_batch);
    waiting = waiting.slice(running.length);
    let start = 0, end = largest(running.map(({prompt}) => prompt));
    const capacity = end + largest(running.map(({limit}) => limit - 1)), waits_for = "the batch";
    for (; !running.every(({finished}) => finished); start = end++, step++) {
      const plan = running.map(request => [request, request.finished ? 0 : request.todo]);
      yield {step, plan, running, waiting, waits_for, columns: end, capacity,
             cost: static_batch(plan, start, end)};
      advance(plan);
    }
  }
}

function* dynamic(waiting, {max_batch}, clock) {
  let running = [];
  for (let step = 0; waiting.length || running.length; step++) {
    if (!running.length) step = clock.next_step(step, waiting[0]);
    const arrived = waiting.filter(request => clock.arrived(request, step));
    const admitted = arrived.slice(0, max_batch - running.length);
    waiting = waiting.slice(admitted.length);
    running = [...running, ...admitted];
    const decodes = running.filter(one => one.generated).map(one => [one, 1]);
    const prompts = running.filter(one => !one.generated).map(one => [one, one.todo]);
    for (const plan of [decodes, prompts].filter(part => part.length)) {
      yield {step, plan, running, waiting, waits_for: "a place", cost: rectangle(plan)};
      advance(plan);
    }
    running = running.filter(request => !request.finished);
  }
}

function* scheduled(scheduler, layout, passes_of = plan => [plan]) {
  for (let step = 0; scheduler.busy; step++) {
    step = scheduler.next_step(step);
    for (const plan of passes_of(scheduler.schedule(step)).filter(part => part.length)) {
      const {running, waiting, waits_for, pages} = scheduler;
      yield {step, plan, running, waiting, waits_for, pages, cost: layout(plan)};
      scheduler.update(plan);
    }
  }
}

const two_passes = plan => [1, 0].map(is => plan.filter(([{todo}]) => (todo === 1) == is));
const STAGES = {
  unbatched, naive, dynamic,
  chunked: (...load) => scheduled(new Scheduler(...load), rectangle, two_passes),
  interleaved: (...load) => scheduled(new Scheduler(...load), rectangle),
  ragged: (...load) => scheduled(new Scheduler(...load), flat),
  paged: (...load) => scheduled(new PagedScheduler(...load), flat),
  prefix: (...load) => scheduled(new PrefixScheduler(...load), flat)};

// --- toolbox/trace.py, lab/simulate: what happened, and when -------------------------------------

// Returns {requests, passes, totals, counts, pool}. A pass has what page.run_data has as columns,
// and waits_for, waiting. gpu: of page.gpu_data; knobs: Python's, and `in_ms`: arrivals are ms on
// the calculated clock, not steps; keep: false for totals only, since a long run has many passes.
// Requests that could never run have a reason in `refused`.
export function simulate(stage, load, knobs, gpu, keep = true) {
  const requests = load.map((lengths, number) => new Request(lengths, number));
  const queue = [...requests].sort((a, b) => a.arrival - b.arrival), clock = new Clock(knobs.in_ms);
  const passes = [], totals = {passes: 0, slots: 0, useful: 0, at_once: 0, reserved: 0};
  let pages = null, before = null, seen = 0;
  for (const batch of STAGES[stage](queue, knobs, clock)) {
    const sampled = requests_due(batch.plan), pass = record_pass(batch, gpu, sampled.length);
    const {step} = batch, {now} = clock, begins = before?.step !== step;
    for (; begins && seen < queue.length && clock.arrived(queue[seen], step); seen++) {
      const {arrival} = queue[seen];
      Object.assign(queue[seen], {step, arrived: knobs.in_ms || !arrival ? arrival : now});
    }
    for (const name of ["passes", "slots", "useful"]) totals[name] += pass[name] ?? 1;
    for (const name of ["at_once", "reserved"]) totals[name] = Math.max(totals[name], pass[name]);
    if (keep) {
      pass.start = begins ? now : before.start;   // of its step
      pass.room = room_changes(requests, batch);
      pass.waiting = batch.waiting.filter(one => clock.arrived(one, step)).map(one => one.number);
      passes.push(pass);
    }
    clock.now += pass.ms;
    for (const request of sampled) {
      request.token_steps.push(step);
      request.token_times.push(clock.now);
    }
    [pages, before] = [batch.pages, pass];
  }
  return {requests, passes, totals, counts: pages?.counts ?? {},
          pool: pages ? {pages: pages.number, page_size: pages.size} : null};
}

function record_pass(batch, gpu, sampled) {   // as Trace and Recorder
  const {step, plan, running, pages, columns = 0, capacity, cost, waits_for} = batch;
  const work = [], finished = [], [B, T] = cost.shape, slots = B * (T ?? 1);
  let planned = 0, useful = 0, useful_scores = 0, own = 0;
  for (const [request, n] of plan) {
    if (!n) finished.push(request.number);
    if (!n) continue;
    const first = request.computed, end = first + n;
    const fresh = Math.max(0, end - Math.max(first, request.reached));
    work.push(request.number, first, n);
    planned += n;
    own += end;
    useful += fresh;
    useful_scores += fresh * (2 * end - fresh + 1) / 2;   // the sum of end - fresh + 1 .. end
    request.reached = Math.max(request.reached, end);
  }
  const reserved = pages ? (pages.number - pages.free_queue.size) * pages.size
    : capacity ? capacity * plan.length : sum(running.map(request => request.kv_tokens));
  return {step, start: 0, ms: milliseconds(gpu, slots, cost, sampled), shape: cost.shape, slots,
          work, finished, useful, recomputed: planned - useful, finished_slots: finished.length,
          pad_slots: slots - planned - finished.length, score_entries: cost.scores, useful_scores,
          padded_keys: cost.keys - own, copied_bytes: cost.copied * gpu.kv_bytes, columns,
          past: T ? cost.keys / B - T : 0, at_once: running.length, reserved, room: null,
          cached: pages?.in_order ?? [], waits_for, waiting: null};
}

// {request: its capacity, block table or null}, where it differs from the last pass.
function room_changes(requests, {running, capacity}) {
  const changes = {};
  for (const request of running) request.runs = true;
  for (const request of requests) {
    const {runs, block_table: table} = request;
    const room = !runs ? 0 : table?.length ?? capacity ?? request.kv_tokens;
    request.runs = false;
    if (room === request.room && table === request.table) continue;
    Object.assign(request, {room, table});
    changes[request.number] = runs ? table?.slice() ?? room : null;
  }
  return changes;
}

function milliseconds(c, slots, {scores, keys, copied}, sampled) {   // Shape.seconds
  const arithmetic = (slots + c.tile) * c.row + sampled * c.sample + scores * c.score;
  const reading = c.weights + (sampled ? c.vocabulary : 0) + (keys + slots) * c.key
    + copied * c.copy;
  return 1e3 * (Math.hypot(arithmetic, reading) + c.overhead + c.per_request * sampled);
}
