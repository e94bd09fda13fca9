/**
 * Overview: six numbers, the curves over steps with marks, and the diagnosis of the MFU.
 *
 * Input: the parts run, metrics, ledger of the store. Output: cards, charts, a list of
 * marks, and the last rows as a table for readers who cannot see the charts.
 */

import { makeChart } from "../js/chart.js";
import { onScheme } from "../js/colours.js";
import { choice, el, empty, fill, say, table } from "../js/dom.js";
import { redrawer } from "../js/draws.js";
import { count, digits, percent, rate, seconds } from "../js/format.js";
import { MARKS, sayLeftOut } from "../js/marks.js";
import { median, recentMean, whyNoRows } from "../js/metrics.js";
import { usualTop } from "../js/range.js";

const perS = (value) => `${count(value)} tokens/s`;
const exact = (value) => percent(value, 2);
const round = (value) => percent(value, 0);
const CHARTS = [
  ["loss", "Loss (nats per token)", "accent", digits, digits, { dotsName: "held out" }],
  ["tokens_per_s", "Throughput of each step (tokens/s)", "second", perS, rate, { top: usualTop }],
  ["mfu", "MFU of each step (part of the peak)", "third", exact, round, { top: usualTop }],
  ["step_s", "Time of each step", "muted", seconds, seconds],
  ["grad_norm", "Gradient norm", "accent", digits, digits],
];
const WINDOWS = [
  ["0", "all"],
  ["1000", "last 1,000"],
  ["200", "last 200"],
];
const LAST_ROWS = 12;
const NOTE =
  "Step times exclude evaluations and saves, and may include part of the next step. " +
  "Tokens/s, MFU and step time above are means of the last steps.";

/** Make the view. */
export function make({ store }) {
  const cards = {};
  const cardBox = el("section", { class: "cards", "aria-label": "Newest values" });
  for (const [name, title] of [
    ["step", "Step"],
    ["loss", "Loss"],
    ["tokens_per_s", "Tokens/s"],
    ["mfu", "MFU"],
    ["step_s", "Step time"],
    ["effective", "Effective time"],
  ]) {
    const value = el("p", { class: "value" }, "–");
    const more = el("p", { class: "more" });
    cards[name] = { value, more };
    cardBox.append(el("div", { class: "card" }, el("h3", {}, title), value, more));
  }
  const leftOut = el("p", { class: "muted left-out", role: "status" });
  const onLeftOut = (kinds) => say(leftOut, sayLeftOut(kinds));
  const charts = CHARTS.map(([name, title, colour, full, short, more], index) => ({
    name,
    // All charts show the same steps, so one of them tells which marks fit.
    ...makeChart(title, colour, full, short, index ? more : { ...more, onLeftOut }),
  }));
  let window_ = "0";
  const steps = choice("Steps", WINDOWS, window_, (value) => {
    window_ = value;
    draw("zoom");
  });
  const marks = el("ul", { class: "marks", "aria-label": "Marks of the run" });
  const foot = el("div", {}, leftOut, el("p", { class: "muted" }, NOTE));
  const body = el("div", {});
  const report = el("div", {});
  const lastRows = el("details", { class: "panel" }, el("summary", {}, "Last rows as a table"));
  const last = el("div", {});
  lastRows.append(last);
  const panel = el(
    "section",
    { class: "panel", "aria-label": "Curves" },
    el("div", { class: "head" }, el("h2", {}, "Over the steps"), steps.box),
    body,
    foot,
  );
  const element = el("div", {}, cardBox, panel, report, lastRows);
  let visible = false;
  let due = [];
  // Draw one chart a frame: all of them would block the page for a tenth of a second.
  const drawChart = redrawer("overview", (kinds) => {
    const showNext = visible ? due.shift() : null;
    if (!showNext) return false;
    showNext();
    if (due.length) drawChart([...kinds][0]);
    return true;
  });
  const draw = redrawer("overview", (kinds) => {
    if (!visible) return false;
    const metrics = store.get("metrics");
    showCards(cards, metrics, store.get("ledger"), store.get("run"));
    due = chartsDue(body, charts, marks, metrics, Number(window_));
    foot.hidden = !due.length;
    drawChart([...kinds][0]);
    showReport(report, metrics);
    if (lastRows.open) showRows(last, metrics);
    return true;
  });
  lastRows.addEventListener("toggle", () => draw("pick"));
  store.on(["metrics", "ledger", "run"], () => draw("live"));
  onScheme(() => charts.forEach((chart) => chart.rebuild()));
  return {
    element,
    show() {
      visible = true;
      draw("first");
    },
    hide() {
      visible = false;
    },
  };
}

function showCards(cards, metrics, ledger, run) {
  const columns = metrics?.columns ?? {};
  const now = (name) => columns[name]?.at(-1) ?? null;
  const usual = (name) => median((columns[name] ?? []).slice(-200));
  const set = (name, value, more = "") => {
    say(cards[name].value, value);
    say(cards[name].more, more);
  };
  const mean = recentMean(metrics);
  const of = (text) => {
    if (text === "–") return "";
    return `${mean?.num > 1 ? `mean of ${mean.num} steps, ` : ""}median ${text}`;
  };
  const step = metrics?.steps?.at(-1) ?? run?.newest_step ?? null;
  set("step", count(step), run?.generation ? `start ${run.generation}` : "");
  set("loss", digits(now("loss"), 4), change(columns.loss));
  set("tokens_per_s", rate(mean?.tokens_per_s), of(rate(usual("tokens_per_s"))));
  const ofPeak = of(percent(usual("mfu")));
  set("mfu", percent(mean?.mfu), ofPeak || (metrics?.steps?.length ? "no peak known" : ""));
  set("step_s", seconds(mean?.step_s), of(seconds(usual("step_s"))));
  const known = ledger && !ledger.problem;
  set(
    "effective",
    known ? percent(ledger.effective) : "–",
    known ? `of ${seconds(ledger.wall_s)}` : "not known yet",
  );
}

function change(loss) {
  const known = (loss ?? []).filter((each) => each !== null);
  if (known.length < 40) return "";
  const mean = (part) => part.reduce((sum, each) => sum + each, 0) / part.length;
  const [before, now] = [mean(known.slice(-40, -20)), mean(known.slice(-20))];
  const moved = now - before;
  return `${moved < 0 ? "down" : "up"} ${digits(Math.abs(moved), 2)} in 20 rows`;
}

/** Return a function that draws it for each chart that has values. */
function chartsDue(body, charts, marks, metrics, last) {
  const none = whyNoRows(metrics);
  if (none) {
    if (body.textContent !== none.what + none.why) fill(body, empty(none.what, none.why));
    return [];
  }
  if (!body.contains(marks))
    fill(
      body,
      charts.map((chart) => chart.element),
      marks,
    );
  const from = last ? metrics.steps.at(-1) - last : -Infinity;
  const first = metrics.steps.findIndex((step) => step > from);
  const steps = metrics.steps.slice(first);
  const shown = (metrics.marks ?? []).filter((mark) => mark.step >= steps[0]);
  const due = [];
  for (const chart of charts) {
    const values = metrics.columns[chart.name]?.slice(first) ?? [];
    const isThere = values.some((each) => each !== null);
    chart.element.hidden = !isThere;
    const dots = chart.name === "loss" ? dotsOf(metrics, first) : [];
    if (isThere) due.push(() => chart.show({ steps, values, dots, marks: shown }));
  }
  showMarks(marks, metrics);
  return due;
}

/** Return the held-out loss of the rows from an index on; null in rows without it. */
function dotsOf({ steps, columns }, first) {
  return (columns.eval_loss ?? new Array(steps.length).fill(null)).slice(first);
}

function showMarks(list, { marks = [], num_marks = {} }) {
  const newest = new Map(marks.map((mark) => [mark.kind, mark]));
  fill(
    list,
    [...newest].map(([kind, last]) => {
      const [sign, , name] = MARKS[kind] ?? MARKS.warning;
      return el(
        "li",
        {},
        el("span", { class: `mark-sign mark-${kind}`, "aria-hidden": "true" }, sign),
        ` ${name}, ${count(num_marks[kind])} (last: step ${count(last.step)}, ${last.text})`,
      );
    }),
  );
  if (!newest.size) fill(list, el("li", {}, "no saves, evaluations or restarts yet"));
}

function showReport(box, metrics) {
  const found = metrics?.mfu_report;
  if (found) {
    fill(
      box,
      el(
        "section",
        { class: "panel", "aria-label": "Shape of the MFU" },
        el("h2", {}, `Shape of the MFU: ${String(found.class ?? "unclear").replaceAll("_", " ")}`),
        found.meaning ? el("p", {}, found.meaning) : null,
        (found.evidence ?? []).map((each) => el("p", { class: "muted" }, each)),
        found.action ? el("p", {}, `To do: ${found.action}`) : null,
        (found.cautions ?? []).map((each) => el("p", { class: "muted" }, `Caution: ${each}`)),
        found.decides?.length
          ? el("p", {}, `What would decide it: ${found.decides.join("; ")}.`)
          : null,
      ),
    );
  } else if (metrics?.mfu_problem) {
    fill(
      box,
      el(
        "section",
        { class: "panel", "aria-label": "Shape of the MFU" },
        el("h2", {}, "Shape of the MFU: not known"),
        el("p", { class: "muted" }, metrics.mfu_problem),
      ),
    );
  } else fill(box);
}

function showRows(box, metrics) {
  const num = metrics?.steps?.length ?? 0;
  const rows = Array.from({ length: Math.min(LAST_ROWS, num) }, (_, index) => num - 1 - index);
  const names = CHARTS.filter(([name]) => metrics?.columns?.[name]);
  fill(
    box,
    table(
      `The last ${rows.length} rows, the newest first`,
      [
        { head: "step", num: true, cell: (row) => count(metrics.steps[row]) },
        ...names.map(([name, title, , full]) => ({
          head: title,
          num: true,
          cell: (row) => full(metrics.columns[name][row]),
        })),
      ],
      rows,
    ),
  );
}
