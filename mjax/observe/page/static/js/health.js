/**
 * The three answers above every view: is the run running, who is slow, what does it cost.
 *
 * Input: the parts run, state, stuck, stragglers, whatif, ledger, metrics of the store.
 * Output: three short texts, each with a sign and a word in addition to its colour.
 */

import { button, el, fill } from "./dom.js";
import { count, percent, plural, ranks, rate, seconds, times } from "./format.js";
import { recentMean } from "./metrics.js";

const SIGNS = { good: "●", warn: "▲", bad: "■", none: "○" };

/** Fill the section, now and whenever one of these parts changes. */
export function showHealth(section, context) {
  const { store } = context;
  const boxes = [0, 1, 2].map(() => el("div", { class: "answer" }));
  section.append(...boxes);
  const shown = [null, null, null];
  const draw = () => {
    [running(store), slow(store), cost(store)].forEach((answer, index) => {
      const key = JSON.stringify(answer);
      if (shown[index] === key) return;
      shown[index] = key;
      show(boxes[index], answer, context);
    });
  };
  store.on(["run", "state", "stuck", "stragglers", "whatif", "ledger", "metrics"], draw);
  draw();
}

function show(box, answer, context) {
  box.className = `answer ${answer.level}`;
  const says = answer.view
    ? button(answer.says, () => context.go(answer.view), { class: "linkish" })
    : answer.says;
  fill(
    box,
    el("h2", {}, answer.asks),
    el(
      "p",
      { class: "says" },
      el("span", { class: "mark", "aria-hidden": "true" }, SIGNS[answer.level]),
      says,
    ),
    el("p", { class: "why" }, answer.why),
  );
}

/** Answer "Is it running?" from the store: {asks, level, says, why, view}. Pure. */
export function running(store) {
  const asks = "Is it running?";
  const [run, state, stuck] = ["run", "state", "stuck"].map(store.get);
  if (!run) return { asks, level: "none", says: "Asking the server", why: "" };
  if (run.failed) return { asks, level: "bad", says: "No answer", why: run.problem };
  const rows = state?.ranks ?? [];
  if (!run.is_complete && !rows.length) {
    return { asks, level: "none", says: "Loading", why: "The server is reading the run." };
  }
  if (!run.run && !rows.length) {
    return {
      asks,
      level: "none",
      says: "Not started",
      why: "No spans yet; they appear after the first step.",
    };
  }
  const step = Math.max(run.newest_step, ...(store.get("metrics")?.steps?.slice(-1) ?? []));
  if (stuck?.is_stuck) {
    const who = stuck.ranks.length
      ? `Stuck: ${stuck.ranks.length > 1 ? "ranks" : "rank"} ${ranks(stuck.ranks, 3)}` +
        `${stuck.host ? ` on ${stuck.host}` : ""}`
      : "Stuck: no rank stands out";
    return {
      asks,
      level: "bad",
      says: who,
      view: "stuck",
      why: `${stuck.phase ?? "no phase"}, step ${count(stuck.step)}; ${stuck.reason}`,
    };
  }
  const failed = run.ranks.filter((each) => each.ended);
  if (failed.length) {
    return {
      asks,
      level: "bad",
      view: "groups",
      says: `Ended: exit code ${failed[0].ended} on ` + `${plural(failed.length, "rank")}`,
      why: `rank ${ranks(
        failed.map((each) => each.rank),
        3,
      )} at step ${count(step)}`,
    };
  }
  if (!run.live) {
    const clean = run.ranks.length && run.ranks.every((each) => each.ended === 0);
    return {
      asks,
      level: clean ? "good" : "warn",
      says: clean ? `Ended at step ${count(step)}` : `Not running, step ${count(step)}`,
      why: clean
        ? "All ranks ended with exit code 0."
        : "No rank writes, and none wrote an exit code: the run was killed.",
    };
  }
  const oldest = rows.reduce(
    (worst, each) => (each.age_s > (worst?.age_s ?? -1) ? each : worst),
    null,
  );
  return {
    asks,
    level: "good",
    says: `Running, step ${count(step)}`,
    why: oldest
      ? `${plural(rows.length, "rank")}; the oldest sign of life is ` +
        `${seconds(Math.round(oldest.age_s * 10) / 10)} old (rank ${oldest.rank})`
      : "",
  };
}

/** Answer "Who is slow?", as `running` does. */
export function slow(store) {
  const asks = "Who is slow?";
  const found = store.get("stragglers");
  if (!found) return { asks, level: "none", says: "Not known yet", why: "" };
  if (found.problem) return { asks, level: "none", says: "Not known", why: found.problem };
  if (!found.outliers.length) {
    return {
      asks,
      level: "good",
      says: "No host stands out",
      why: "No host is slower than its peers beyond the noise.",
    };
  }
  const [first] = found.outliers;
  const more = found.outliers.length - 1;
  return {
    asks,
    level: "warn",
    view: "heat",
    says:
      `${first.host}, ${first.ranks.length > 1 ? "ranks" : "rank"} ${ranks(first.ranks, 3)}` +
      (more ? `, and ${plural(more, "other")}` : ""),
    why:
      `${first.phase}: ${times(first.ratio)} its peers since step ` +
      `${count(first.since_step)}, confidence ${first.confidence.toFixed(2)}`,
  };
}

/** Answer "What does it cost?", as `running` does. */
export function cost(store) {
  const asks = "What does it cost?";
  const [whatif, ledger, metrics] = ["whatif", "ledger", "metrics"].map(store.get);
  const kept =
    ledger && !ledger.problem && ledger.wall_s > 0
      ? `${percent(ledger.effective)} of ${seconds(ledger.wall_s)} was training`
      : "";
  if (whatif && !whatif.problem) {
    const part = whatif.stragglers;
    const lost_s = whatif.step_s - whatif.even_step_s;
    const now = recentMean(metrics)?.tokens_per_s;
    const lost = part > 0 && part < 1 && now ? `, ${rate((now * part) / (1 - part))} tokens/s` : "";
    return {
      asks,
      level: part >= 0.025 ? "warn" : "good",
      view: "ledger",
      says: `Stragglers: ${percent(Math.max(0, part))} of a step`,
      why: `${seconds(lost_s)} of ${seconds(whatif.step_s)}${lost}${kept ? `; ${kept}` : ""}`,
    };
  }
  if (kept) {
    return {
      asks,
      level: ledger.effective >= 0.9 ? "good" : "none",
      view: "ledger",
      says: `${percent(ledger.effective)} effective`,
      why:
        `of ${seconds(ledger.wall_s)}; cost of stragglers: ` +
        `${whatif?.problem ?? "not known yet"}`,
    };
  }
  return {
    asks,
    level: "none",
    says: "Not known yet",
    why: whatif?.problem ?? ledger?.problem ?? "",
  };
}
