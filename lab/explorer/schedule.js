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
  // prompt, answer: numbers of tokens; limit: of the longest answer that it may get
  // equal: for each request before it, with how many of that one's tokens it begins
  // refused: why it can never run; "": it can
  constructor({prompt, answer, limit = answer, arrival = 0, equal = [], refused = ""}, number) {
    Object.assign(this, {number, prompt, answer, limit, arrival, equal, refused});
    Object.assign(this, {computed: 0, generated: 0, block_table: null, page_hashes: []});
    Object.assign(this, {token_steps: [], token_times: []});
    Object.assign(this, {reached: 0, room: null, room_pages: undefined});   // for the record
  }
  get todo() { return this.prompt + this.generated - this.computed; }
  get kv_capacity() { return this.prompt + this.limit - 1; }
  get finished() { return this.generated === this.answer; }
}

function requests_due(plan) {
  return plan.filter(([request, n]) => n === request.todo).map(([request]) => request);
}

function advance(plan) {
  const due = requests_due(plan);
  for (const [request, n] of plan) request.computed += n;
  for (const request of due) request.generated += 1;
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
    Object.assign(this, {waiting: [], running: []});
    for (const request of requests) this.add(request);
  }
  add(request) {                         // Python refuses the whole run
    if (request.kv_capacity <= this.max_kv_tokens) this.waiting.push(request);
    else request.refused = `${request.kv_capacity} KV tokens, there are ${this.max_kv_tokens}`;
  }
  schedule(step) {
    const plan = [], running = this.running.length;
    let budget = this.token_budget;
    for (const request of this.running) {   // `make_room` may take others from the list's end
      const n = Math.min(request.todo, budget);
      if (!n || !this.make_room(request, n)) continue;
      plan.push([request, n]);
      budget -= n;
    }
    const preempted = this.running.length < running;
    while (budget && !preempted && this.running.length < this.max_batch) {
      if (!this.arrived(step) || !this.admit(this.waiting[0])) break;
      const request = this.waiting.shift();
      this.running.push(request);
      const n = Math.min(request.todo, budget);
      this.make_room(request, n);
      plan.push([request, n]);
      budget -= n;
    }
    if (!plan.length) throw Error(`step ${step}: nothing can go on`);
    return plan;
  }
  update(plan) {
    advance(plan);
    for (const request of this.running.filter(request => request.finished)) this.free(request);
    this.running = this.running.filter(request => !request.finished);
  }
  get busy() { return this.waiting.length + this.running.length > 0; }
  next_step(step) {
    return this.running.length ? step : this.clock.next_step(step, this.waiting[0]);
  }
  arrived(step) { return this.waiting.length > 0 && this.clock.arrived(this.waiting[0], step); }
  admit(request) {
    const reserved = sum(this.running.map(other => other.kv_capacity));
    return reserved + request.kv_capacity <= this.max_kv_tokens;
  }
  make_room() { return true; }
  free() {}
}

// --- paging.py, generate_paged.py ----------------------------------------------------------------

class PagePool {
  constructor(number, page_size) {
    Object.assign(this, {number, page_size, free_queue: Array.from(Array(number).keys())});
  }
  get free_pages() { return this.free_queue.length; }
  get cached_and_free() { return []; }
  needed(tokens) { return Math.ceil(tokens / this.page_size); }
  allocate(table, number) { table.push(...this.free_queue.splice(0, number)); }
  free(table) { this.free_queue.push(...table); }
}

function pool_size(requests, {max_batch, page_size, pages = null}) {
  const needed = requests.map(({kv_capacity}) => Math.ceil(kv_capacity / page_size));
  if (pages !== null) return Math.min(pages, sum(needed));
  return sum(needed.sort((a, b) => b - a).slice(0, max_batch));
}

class PagedScheduler extends Scheduler {
  constructor(requests, knobs, clock) {
    const number = pool_size(requests, knobs), {page_size} = knobs;
    super(requests, {...knobs, max_kv_tokens: number * page_size}, clock);
    this.pool = new PagePool(number, page_size);
  }
  admit(request) {
    if (this.pool.needed(request.todo) > this.pool.free_pages) return false;
    request.block_table = [];
    return true;
  }
  make_room(request, n) {
    const more = this.pool.needed(request.computed + n) - request.block_table.length;
    while (more > this.pool.free_pages) {
      const victim = this.running.at(-1);
      this.preempt(victim);
      if (victim === request) return false;
    }
    this.pool.allocate(request.block_table, more);
    return true;
  }
  preempt(request) {
    this.running.pop();
    this.free(request);
    request.computed = 0;
    this.waiting.unshift(request);
  }
  free(request) {
    this.pool.free(request.block_table);
    request.block_table = null;
  }
}

// --- generate_prefix.py --------------------------------------------------------------------------

// What tells a page's tokens, and all before them, from others: who has them first, and their end.
function page_hash({number, equal}, end) {
  const first = equal.findIndex(tokens => tokens >= end);
  return `${first < 0 ? number : first} ${end}`;
}

// Python's free queue in two parts, so that nothing is moved: `blank`, its front, has the pages that
// nobody can find, the next to be taken last; `free_queue`, behind it, those that can be found.
class PrefixPool extends PagePool {
  constructor(number, page_size) {
    super(number, page_size);
    Object.assign(this, {blank: this.free_queue.reverse(), free_queue: new Set()});
    Object.assign(this, {ref_count: Array(number).fill(0), cached: new Map(), hash_of: new Map()});
  }
  get free_pages() { return this.blank.length + this.free_queue.size; }
  get cached_and_free() { return [...this.free_queue]; }
  find(hash) {                           // the oldest page that has it
    const [page] = this.cached.get(hash) ?? [];
    return page;
  }
  share(table, pages) {
    for (const page of pages) {
      this.free_queue.delete(page);
      this.ref_count[page] += 1;
      table.push(page);
    }
  }
  allocate(table, number) {
    for (let i = 0; i < number; i++) this.share(table, [this.blank.pop() ?? this.evict()]);
  }
  evict() {
    const [page] = this.free_queue, hash = this.hash_of.get(page), pages = this.cached.get(hash);
    this.hash_of.delete(page);
    pages.delete(page);
    if (!pages.size) this.cached.delete(hash);
    return page;                         // `share` takes it out of the queue
  }
  free(table) {
    for (const page of [...table].reverse()) {
      this.ref_count[page] -= 1;
      if (this.ref_count[page]) continue;
      if (this.hash_of.has(page)) this.free_queue.add(page); else this.blank.push(page);
    }
  }
  register(page, hash) {
    this.hash_of.set(page, hash);
    if (!this.cached.has(hash)) this.cached.set(hash, new Set());
    this.cached.get(hash).add(page);
  }
}

class PrefixScheduler extends PagedScheduler {
  constructor(...load) {
    super(...load);
    this.pool = new PrefixPool(this.pool.number, this.pool.page_size);
  }
  hash_of_page(request, i) {
    const known = request.page_hashes, {page_size} = this.pool;
    while (known.length <= i) known.push(page_hash(request, (known.length + 1) * page_size));
    return known[i];
  }
  admit(request) {
    const {pool} = this, full = Math.floor((request.todo - 1) / pool.page_size), found = [];
    for (let i = 0, page; i < full; i++) {
      page = pool.find(this.hash_of_page(request, i));
      if (page === undefined) break;
      found.push(page);
    }
    const more = pool.needed(request.todo) - found.length;
    const revived = found.filter(page => pool.free_queue.has(page)).length;
    if (more + revived > pool.free_pages) return false;
    Object.assign(request, {block_table: [], computed: found.length * pool.page_size});
    pool.share(request.block_table, found);
    return true;
  }
  make_room(request, n) {
    const granted = super.make_room(request, n);
    if (granted) this.cache_filled(request, request.computed, request.computed + n);
    return granted;
  }
  cache_filled(request, start, end) {
    const {page_size} = this.pool;
    for (let i = Math.floor(start / page_size); i < Math.floor(end / page_size); i++) {
      this.pool.register(request.block_table[i], this.hash_of_page(request, i));
    }
  }
}

// --- layouts: the tensor's shape; the scores that attention computes, the keys that it reads, and
// --- those that it copies, of all rows. (A GPU reads pages through the table, and copies none.)

const n_of = ([, n]) => n, start_of = ([{computed}]) => computed;
const end_of = ([{computed}, n]) => computed + n;

function static_batch({length: B}, start, end) {
  return {shape: [B, end - start], scores: B * (end - start) * end, keys: B * end, copied: 0};
}

function rectangle(plan) {
  const B = plan.length, T = largest(plan.map(n_of)), P = largest(plan.map(start_of));
  return {shape: [B, T], scores: B * T * (P + T), keys: B * (P + T), copied: B * P + B * (P + T)};
}

function flat(plan) {
  return {shape: [sum(plan.map(n_of))], scores: sum(plan.map(part => n_of(part) * end_of(part))),
          keys: sum(plan.map(end_of)), copied: 0};
}

// One request: its cache is written in place.
const alone = plan => ({...rectangle(plan), copied: 0});

// --- generate_*.py -------------------------------------------------------------------------------

function* naive(waiting, {max_batch}, clock) {
  let step = 0;
  while (waiting.length) {
    step = clock.next_step(step, waiting[0]);
    const running = waiting.filter(one => clock.arrived(one, step)).slice(0, max_batch);
    waiting = waiting.slice(running.length);
    let start = 0, end = largest(running.map(({prompt}) => prompt));
    const capacity = end + largest(running.map(({limit}) => limit - 1));
    for (; !running.every(({finished}) => finished); start = end++, step++) {
      const plan = running.map(request => [request, request.finished ? 0 : request.todo]);
      yield {step, plan, running, columns: end, capacity, cost: static_batch(plan, start, end)};
      advance(plan);
    }
  }
}

function* dynamic(waiting, {max_batch}, clock, layout = rectangle) {
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
      yield {step, plan, running, cost: layout(plan)};
      advance(plan);
    }
    running = running.filter(request => !request.finished);
  }
}

function* scheduled(scheduler, layout, passes_of = plan => [plan]) {
  for (let step = 0; scheduler.busy; step++) {
    step = scheduler.next_step(step);
    for (const plan of passes_of(scheduler.schedule(step)).filter(part => part.length)) {
      yield {step, plan, running: scheduler.running, pool: scheduler.pool, cost: layout(plan)};
      scheduler.update(plan);
    }
  }
}

function decodes_and_chunks(plan) {
  return [plan.filter(([{todo}]) => todo === 1), plan.filter(([{todo}]) => todo > 1)];
}

const STAGES = {   // unbatched is dynamic with one request at a time
  unbatched: (requests, knobs, clock) => dynamic(requests, {max_batch: 1}, clock, alone),
  naive, dynamic,
  chunked: (...load) => scheduled(new Scheduler(...load), rectangle, decodes_and_chunks),
  interleaved: (...load) => scheduled(new Scheduler(...load), rectangle),
  ragged: (...load) => scheduled(new Scheduler(...load), flat),
  paged: (...load) => scheduled(new PagedScheduler(...load), flat),
  prefix: (...load) => scheduled(new PrefixScheduler(...load), flat)};

// --- toolbox/trace.py, lab/simulate: what happened, and when -------------------------------------

// Returns {requests, passes, pool}. A pass has what page.run_data has as columns. gpu: of
// page.gpu_data; knobs: Python's, and `in_ms`: arrivals are ms on the calculated clock, not steps.
// Requests that could never run have a reason in `refused`.
export function simulate(stage, load, knobs, gpu) {
  const requests = load.map((lengths, number) => new Request(lengths, number));
  const clock = new Clock(knobs.in_ms), passes = [];
  const queue = requests.filter(({refused}) => !refused).sort((a, b) => a.arrival - b.arrival);
  let pool = null;
  for (const batch of STAGES[stage](queue, knobs, clock)) {
    const {step, plan} = batch, due = requests_due(plan), before = passes.at(-1);
    const pass = record_pass(batch, gpu, due.length);
    pass.start = before?.step === step ? before.start : clock.now;   // of the step
    pass.room = room_changes(requests, batch);
    passes.push(pass);
    clock.now += pass.ms;
    for (const request of due) {
      request.token_steps.push(step);
      request.token_times.push(clock.now);
    }
    pool = batch.pool ? {pages: batch.pool.number, page_size: batch.pool.page_size} : null;
  }
  return {requests, passes, pool};
}

function record_pass(batch, gpu, sampled) {   // as Trace and Recorder
  const {step, plan, running, pool, columns = 0, capacity, cost} = batch, {shape} = cost;
  const work = [], finished = [], slots = shape.reduce((a, b) => a * b);
  let planned = 0, own = 0, useful = 0, useful_scores = 0;
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
  const reserved = pool ? (pool.number - pool.free_pages) * pool.page_size
    : capacity ? capacity * plan.length : sum(running.map(request => request.kv_capacity));
  return {step, ms: milliseconds(gpu, slots, cost, sampled), shape, slots, work, finished, useful,
          recomputed: planned - useful, pad_slots: slots - planned - finished.length,
          finished_slots: finished.length, score_entries: cost.scores, useful_scores,
          padded_keys: cost.keys - own, copied_bytes: cost.copied * gpu.kv_bytes, columns,
          at_once: running.length, reserved, cached: pool?.cached_and_free ?? []};
}

// {request: its capacity, block table or null}, where it differs from the last pass.
function room_changes(requests, {running, capacity}) {
  const changes = {};
  for (const request of requests) {
    const holds = running.includes(request), table = holds ? request.block_table : null;
    const room = holds ? table ?? capacity ?? request.kv_capacity : null;
    if (room === request.room && table?.length === request.room_pages) continue;
    Object.assign(request, {room, room_pages: table?.length});
    changes[request.number] = table ? [...table] : room;
  }
  return changes;
}

function milliseconds(c, slots, {scores, keys, copied}, sampled) {   // Shape.seconds
  const arithmetic = (slots + c.tile) * c.row + sampled * c.sample + scores * c.score;
  const reading = c.weights + (sampled ? c.vocabulary : 0) + (keys + slots) * c.key
    + copied * c.copy;
  return 1e3 * (Math.hypot(arithmetic, reading) + c.overhead + c.per_request * sampled);
}
