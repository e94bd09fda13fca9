/**
 * The pure modules of the page, without a browser: node --test.
 *
 * Enters: PAGE_STATIC, a copy of the page's files in which .js are ES modules.
 */

import assert from "node:assert/strict";
import { test } from "node:test";
import { pathToFileURL } from "node:url";

const JS = `${pathToFileURL(process.env.PAGE_STATIC).href}/js/`;
const load = (name) => import(JS + name);
const format = await load("format.js");
const heat = await load("heat_data.js");
const health = await load("health.js");
const metrics = await load("metrics.js");
const marks = await load("marks.js");
const mesh = await load("mesh_layout.js");
const range = await load("range.js");
const store = await load("store.js");
const timeline = await load("timeline_data.js");

test("ranks are written as ranges and read back", () => {
  assert.equal(format.ranks([5, 0, 1, 2, 7, 8]), "0–2, 5, 7, 8");
  assert.equal(format.ranks([]), "none");
  assert.deepEqual(format.parseRanks("0-2, 5", [0, 1, 2, 3, 4, 5]), { ranks: [0, 1, 2, 5] });
  assert.match(format.parseRanks("9", [0, 1]).error, /no rank 9/);
  assert.match(format.parseRanks("<b>", [0, 1]).error, /"<b>" is not a rank/);
});

test("a step that was timed with another one does not set the end of the axis", () => {
  for (const every of [2, 3, 20]) {
    const took = Array.from({ length: 1000 }, (_, at) => (at % every ? 0.1 : 0.0004));
    took[0] = 20;
    const top = range.usualTop(took.map((each) => 1024 / each));
    assert.ok(top > 5000 && top < 11000, `${top}`);
  }
  assert.equal(range.usualTop([...Array(90).fill(100), ...Array(10).fill(200)]), 200);
  assert.equal(range.usualTop([null]), null);
});

test("durations keep three digits and their unit", () => {
  assert.equal(format.seconds(0.000123), "123 µs");
  assert.equal(format.seconds(0.0412), "41.2 ms");
  assert.equal(format.seconds(3725), "62 min 05 s");
  assert.equal(format.seconds(null), "–");
});

function answer(rows, hosts = rows.map(() => "a")) {
  return { header: { ranks: rows.map((_, rank) => rank), hosts, lo: 0, hi: 254, phase: "step",
    steps: rows[0].map((_, col) => col + 1), phases: ["step"] }, cells: Uint8Array.from(rows.flat()) };
}

test("a single slow cell survives when thousands share its pixel", () => {
  const rows = Array.from({ length: 4096 }, () => new Array(100).fill(10));
  rows[2777][63] = 200;
  const made = heat.matrix(answer(rows));
  const lut = Uint32Array.from({ length: 256 }, (_, byte) => byte);
  const out = new Uint32Array(20 * 50);
  heat.pool(made.bytes, made.cols, heat.ordered(made), { x: [0, 100], y: [0, 4096] }, 20, 50, lut, out);
  const bright = [...out.keys()].filter((at) => out[at] === 201);
  assert.deepEqual(bright, [Math.floor((2777 / 4096) * 50) * 20 + Math.floor((63 / 100) * 20)]);
});

test("a zoomed picture shows each cell at its place, and absent ones as such", () => {
  const made = heat.matrix(answer([[0, 255], [254, 7]]));
  const lut = Uint32Array.from({ length: 256 }, (_, byte) => byte);
  const out = new Uint32Array(16);
  heat.pool(made.bytes, 2, heat.ordered(made), { x: [0, 2], y: [0, 2] }, 4, 4, lut, out);
  assert.deepEqual([...out], [1, 1, 0, 0, 1, 1, 0, 0, 255, 255, 8, 8, 255, 255, 8, 8]);
});

test("against the median of its step a rank that is half as slow again is at the end of the scale", () => {
  const made = heat.matrix(answer([[100, 200], [100, 200], [150, 200], [255, 200]]));
  const medians = heat.stepMedians(made);
  assert.deepEqual([...medians], [101, 201]);
  const found = heat.relative(made, medians);
  const usual = 1 + Math.round(254 * ((1 - heat.RATIO[0]) / (heat.RATIO[1] - heat.RATIO[0])));
  assert.deepEqual([...found], [usual, usual, usual, usual, 255, usual, 0, usual]);
});

test("ranks of one host stand together, in the order of their first rank", () => {
  const made = heat.matrix(answer([[1], [1], [1], [1]], ["b", "a", "b", "a"]));
  const order = heat.ordered(made);
  assert.deepEqual([...order], [0, 2, 1, 3]);
  assert.deepEqual(heat.hostBands(made, order), [{ host: "b", from: 0, to: 2 }, { host: "a", from: 2, to: 4 }]);
});

test("new columns keep the old scale, and a gap is not papered over", () => {
  const old = heat.matrix(answer([[10, 20], [30, 40]]));
  const news = heat.matrix({ header: { ...answer([[0], [0]]).header, steps: [3], lo: 0, hi: 508 },
    cells: Uint8Array.from([10, 255]) });
  const found = heat.appended(old, news, 2);
  assert.deepEqual(found.steps, [2, 3]);
  assert.deepEqual([...found.bytes], [21, 21, 41, 0]);
  assert.equal(heat.appended(old, { ...news, steps: [4] }, 2), null);
  assert.equal(heat.appended(old, { ...news, ranks: [0, 9] }, 2), null);
});

const MESH = { pp: 2, dp_replicate: 1, dp_shard: 2, tp: 2 };
const RUN = { mesh: MESH, ranks: [0, 1, 2, 3].map((rank) => ({ rank, devices: [2 * rank, 2 * rank + 1] })) };

test("a device stands where its flat number says, last axis fastest", () => {
  assert.deepEqual(mesh.coordinates(5, MESH), { pp: 1, dp_replicate: 0, dp_shard: 0, tp: 1 });
  const made = mesh.cells(RUN);
  assert.deepEqual(made.list[5], { rank: 2, device: 5, p: 1, d: 0, t: 1 });
});

test("groups of a rank differ from it along one axis only", () => {
  const made = mesh.cells(RUN);
  const found = mesh.groupsOf(made, 0);
  assert.deepEqual([...found.tp], [0, 1]);
  assert.deepEqual([...found.dp], [0, 1, 2, 3]);
  assert.deepEqual([...found.pp], [0, 1, 4, 5]);
});

test("4,096 devices have a place each, none on another, all inside", () => {
  const run = { mesh: { pp: 8, dp_replicate: 4, dp_shard: 16, tp: 8 },
    ranks: Array.from({ length: 4096 }, (_, rank) => ({ rank, devices: [rank] })) };
  const made = mesh.cells(run);
  const laid = mesh.layout(made, { left: 40, top: 0, right: 1000, bottom: 600 });
  const places = new Set(made.list.map((cell) => laid.at(cell).map((each) => each.toFixed(3)).join()));
  assert.equal(places.size, 4096);
  for (const cell of made.list) {
    const [x, y] = laid.at(cell);
    assert.ok(x >= 40 && x + laid.width <= 1000.5 && y >= 0 && y + laid.high <= 600.5);
  }
  const [x, y] = laid.at(made.list[2777]);
  assert.equal(mesh.cellAt(made, laid, { x: x + laid.width / 2, y: y + laid.high / 2 }), 2777);
});

test("a long column of data parallelism goes on beside itself", () => {
  const run = { mesh: { pp: 1, dp_shard: 1024, tp: 1 },
    ranks: Array.from({ length: 1024 }, (_, rank) => ({ rank, devices: [rank] })) };
  const laid = mesh.layout(mesh.cells(run), { left: 0, top: 0, right: 900, bottom: 500 });
  assert.ok(laid.bands > 4 && laid.high > 6 && laid.width > 6, JSON.stringify(laid));
});

test("a range stays inside its limits when it is zoomed and panned", () => {
  assert.deepEqual(range.zoom([0, 100], 0.5, 0, [0, 100], 4), [0, 50]);
  assert.deepEqual(range.zoom([40, 60], 100, 50, [0, 100], 4), [0, 100]);
  assert.deepEqual(range.zoom([50, 54], 0.01, 52, [0, 100], 4), [50, 54]);
  assert.deepEqual(range.pan([80, 100], 50, [0, 100]), [80, 100]);
});

const TIMELINE = {
  rows: [{ rank: 0, host: "a", stream: "device:0", bound_us: 0 }, { rank: 1, host: "b", stream: "device:1", bound_us: null },
    { rank: 1, host: "b", stream: "host", bound_us: null }],
  spans: { row: [0, 1, 0, 1, 2], name: [0, 0, 1, 1, 2], kind: [0, 0, 1, 1, 0], step: [3, 3, 3, 3, 3],
    start_us: [0, 5, 20, 30, 0], end_us: [10, 15, 50, 50, 49] },
  names: ["tick", "norm", "device"], kinds: ["compute", "dp"], arrows: [[0, 3]],
};

test("a span waits for what was sent to it, and a reduction for the last to come", () => {
  const made = timeline.model(TIMELINE);
  assert.deepEqual(timeline.waitsFor(made, 3).map((each) => each.span), [0]);
  assert.deepEqual(timeline.waitsFor(made, 2).map((each) => each.span), [3]);
  assert.deepEqual(timeline.waitsFor(made, 4).map((each) => each.span), [1]);
  assert.deepEqual(timeline.waitedForBy(made, 0), [3]);
});

test("the span under a place is the shortest that covers it", () => {
  const made = timeline.model(TIMELINE);
  assert.equal(timeline.spanAt(made, 0, 5, 1), 0);
  assert.equal(timeline.spanAt(made, 0, 15, 1), null);
  assert.equal(timeline.spanAt(made, 0, 18.5, 2), 2);
});

test("rows of metrics that come again replace the old ones", () => {
  const metrics = { steps: [1, 2, 3], columns: { loss: [3, 2, 1] } };
  const found = store.appendMetrics(metrics, { steps: [3, 4], columns: { loss: [9, 8], mfu: [0.1, 0.2] } });
  assert.deepEqual(found.steps, [1, 2, 3, 4]);
  assert.deepEqual(found.columns, { loss: [3, 2, 9, 8], mfu: [null, null, 0.1, 0.2] });
});

test("nothing is said about rows before the server has answered for them", () => {
  const none = { steps: [], columns: {} };
  assert.equal(metrics.whyNoRows(null).what, "Loading");
  assert.equal(metrics.whyNoRows({ ...none, is_complete: false }).what, "Loading");
  assert.equal(metrics.whyNoRows({ ...none, is_complete: true }).what, "No steps yet");
  assert.deepEqual(metrics.whyNoRows({ problem: "gone", failed: true }), { what: "No answer", why: "gone" });
  assert.equal(metrics.whyNoRows({ ...none, steps: [1], is_complete: false }), null);
});

test("a run counts as not started only when the server has read its files", () => {
  const says = (run) => {
    const known = store.makeStore();
    known.set("run", { run: null, ranks: [], newest_step: 0, ...run });
    return health.running(known).says;
  };
  assert.equal(says({ is_complete: false }), "Loading");
  assert.equal(says({ is_complete: true }), "Not started");
});

test("speed, time and MFU are means of the same last steps, and agree", () => {
  const steps = Array.from({ length: 30 }, (_, at) => at + 1);
  const step_s = steps.map((step) => (step === 1 ? 60 : step === 25 ? 0.11 : 0.01));
  const tokens = steps.map(() => 512);
  const mfu = step_s.map((each) => 0.004 / each);
  const given = (num) => ({ steps: steps.slice(0, num), columns: { step_s: step_s.slice(0, num),
    tokens: tokens.slice(0, num), mfu: mfu.slice(0, num) } });
  const all = metrics.recentMean(given(30));
  const near = (found, expected) => assert.ok(Math.abs(found / expected - 1) < 1e-9, `${found}, not ${expected}`);
  assert.equal(all.num, 10);
  near(all.step_s, 0.02);
  near(all.tokens_per_s, 512 / 0.02);
  near(all.mfu, 0.004 / 0.02);
  // The compilation of a start is in no mean, unless there is nothing else.
  assert.equal(metrics.recentMean(given(5)).num, 4);
  near(metrics.recentMean(given(5)).step_s, 0.01);
  near(metrics.recentMean(given(1)).step_s, 60);
  const restarted = { ...given(30), marks: [{ step: 25, kind: "restart" }, { step: 29, kind: "save" }] };
  assert.equal(metrics.recentMean(restarted).num, 5);
  near(metrics.recentMean(restarted).step_s, 0.01);
  assert.equal(metrics.recentMean({ ...given(3), columns: { step_s: [1, 1, 1], tokens: [8, 8, 8] } }).mfu, null);
  assert.equal(metrics.recentMean(null), null);
});

test("a median is the mean of the two values in the middle, without gaps", () => {
  assert.equal(metrics.median([4, null, 1, 3, 2]), 2.5);
  assert.equal(metrics.median([9, 1, 2]), 2);
  assert.equal(metrics.median([null]), null);
});

test("marks of the last steps replace those that are known", () => {
  const mark = (step, text) => ({ step, kind: "eval", text });
  const known = { steps: [1], columns: {}, marks: [mark(10, "a"), mark(20, "b"), mark(30, "c")] };
  const found = store.appendMarks(known, { from: 20, marks: [mark(20, "b"), mark(40, "d")], num_marks: { eval: 3 } });
  assert.deepEqual(found, { ...known, marks: [mark(10, "a"), mark(20, "b"), mark(40, "d")], num_marks: { eval: 3 } });
});

test("saves and evaluations are drawn only if they have room, and warnings always", () => {
  const every = (kind, gap) => Array.from({ length: Math.floor(1000 / gap) }, (_, at) => ({ step: at * gap, kind, text: "" }));
  const given = [...every("eval", 10), ...every("save", 250), { step: 501, kind: "warning" },
    { step: 502, kind: "warning" }, { step: 502, kind: "error" }];
  const kinds = ({ drawn }) => drawn.map(([mark, x]) => `${mark.kind} ${x}`);
  const whole = marks.fitting(given, (step) => 50 + step, [50, 1050]);
  assert.deepEqual(kinds(whole), ["save 50", "save 300", "save 550", "warning 551", "error 552", "save 800"]);
  assert.deepEqual(whole.leftOut, ["eval"]);
  assert.match(marks.sayLeftOut(whole.leftOut), /^Too close to draw: evaluations\./);
  const zoomed = marks.fitting(given, (step) => 50 + 10 * (step - 300), [50, 1050]);
  assert.equal(kinds(zoomed).filter((each) => each.startsWith("eval")).length, 11);
  assert.deepEqual([zoomed.leftOut, marks.sayLeftOut([])], [[], ""]);
});
