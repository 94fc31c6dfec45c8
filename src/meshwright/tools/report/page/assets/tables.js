// The tables: summary, replicas, ranks, configurations, texts.

function runName(view, run) {
  const dot = element("span", { class: "dot", colour: view.colour(run) });
  dot.dataset.run = run;
  return element("span", { class: "name", title: view.runs[run].path }, dot, view.runs[run].name);
}

function cell(text, classes = "", title) { return element("td", { class: classes, title }, text); }

function stateCell(run) {
  const words = {
    finished: ["finished", "state-finished", ""],
    running: ["running", "state-running", "when this page was made"],
    "cut off": ["cut off", "cut-off", "it wrote no end, and before this page was made nothing for long"],
  };
  const [text, classes, title] = words[run.state];
  const times = run.segments.length - 1;
  const made = cell(times ? `${text}, resumed${times > 1 ? ` ${times} times` : ""}` : text, classes, title);
  if (run.replicas) made.append(element("span", { class: "muted" }, `, ${run.replicas.total}`));
  if (run.lost.length) made.append(element("span", { class: "lost" }, run.lost.map((words) => `, ${words}`).join("")));
  return made;
}

function summaryTable(view, data) {
  const metrics = data.main.map((place) => data.charts[place]);
  const columns = [
    { title: "Run", value: (run) => view.runs[run].name, cell: (run) => element("td", {}, runName(view, run)) },
    { title: "State", value: (run) => view.runs[run].state, cell: (run) => stateCell(view.runs[run]) },
    { title: "Started", value: (run) => view.runs[run].segments[0][0], cell: (run) => cell(view.runs[run].segments[0][0] ? formatClock(view.runs[run].segments[0][0]).slice(0, 16) : "–") },
    { title: "Duration", value: (run) => view.runs[run].seconds, cell: (run) => cell(formatDuration(view.runs[run].seconds), "number") },
    { title: "Last step", value: (run) => view.runs[run].lastStep, cell: (run) => cell(view.runs[run].lastStep === null ? "–" : formatNumber(view.runs[run].lastStep), "number") },
  ];
  for (const metric of metrics) {
    const of = (run, what) => metric.curves.find((curve) => curve.run === run)?.spec[what];
    const best = { last: bestOf(metric, "last"), min: metric.better < 0 ? bestOf(metric, "min") : null, max: metric.better > 0 ? bestOf(metric, "max") : null };
    for (const what of ["last", "min", "max"]) {
      columns.push({
        title: what, metric, value: (run) => of(run, what),
        cell: (run) => {
          const value = of(run, what);
          const text = value === undefined ? "–" : inUnit(metric.unit)(value);
          const classes = `number ${what === "last" ? "edge" : ""} ${text === "NaN" ? "nan" : ""} ${view.runs.length > 1 && value === best[what] && value !== null ? "best" : ""}`;
          return cell(text, classes);
        },
      });
    }
  }
  const body = element("tbody");
  const rows = view.runs.map((_, run) => {
    const row = element("tr", {}, ...columns.map((column) => column.cell(run)));
    row.dataset.run = run;
    return row;
  });
  body.append(...rows);
  const sort = (column, head) => {
    const down = head.getAttribute("aria-sort") === "ascending";
    for (const other of head.closest("thead").querySelectorAll("th")) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const known = (value) => value !== undefined && value !== null;
    const order = view.runs.map((_, run) => run).sort((a, b) => {
      const [p, q] = [column.value(a), column.value(b)];
      if (!known(p) || !known(q)) return known(q) - known(p);
      return (p < q ? -1 : p > q ? 1 : 0) * (down ? -1 : 1);
    });
    body.append(...order.map((run) => rows[run]));
  };
  const heading = (column, attributes) => {
    const button = element("button", { type: "button", title: "sort" }, column.title);
    const head = element("th", attributes, button);
    button.addEventListener("click", () => sort(column, head));
    return head;
  };
  const plain = columns.filter((column) => !column.metric);
  const top = element("tr", {}, ...plain.map((column, i) => heading(column, { rowspan: 2, class: i > 2 ? "number" : "" })),
    ...metrics.map((metric) => element("th", { colspan: 3, class: "edge" }, metric.name)));
  const second = element("tr", {}, ...columns.filter((column) => column.metric).map((column) => heading(column, { class: `number ${column.title === "last" ? "edge" : ""}` })));
  return element("div", { class: "scroll" }, element("table", {}, element("thead", { class: "two" }, top, second), body));
}

function bestOf(metric, what) {
  const values = metric.curves.map((curve) => curve.spec[what]).filter((value) => value !== null);
  if (!metric.better || !values.length) return null;
  return metric.better < 0 ? Math.min(...values) : Math.max(...values);
}

// Who left, why, how long it cost, and who joined.
function replicasTable(view) {
  const tables = view.runs.flatMap(({ replicas }, run) => (replicas ? [oneReplicasTable(view, replicas, run)] : []));
  return tables.length ? element("div", {}, ...tables) : null;
}

function oneReplicasTable(view, replicas, run) {
  const rows = replicas.changes.map(({ time, step, kind, text, seconds, count }) => element("tr", {}, cell(formatClock(time)), cell(formatNumber(step), "number"),
    cell(text, `wrap ${kind}`), cell(seconds === null ? "–" : `${seconds.toFixed(2)} s`, "number"), cell(count, "number")));
  const head = element("tr", {}, element("th", {}, "Time"), element("th", { class: "number" }, "Step"), element("th", {}, `${view.runs[run].name}: ${replicas.total}`),
    element("th", { class: "number", title: "how long training stood still" }, "Cost"), element("th", { class: "number" }, "Replicas after it"));
  const table = element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
  return replicas.leftOut ? element("div", {}, table, element("p", { class: "muted" }, `${count(replicas.leftOut, "earlier change")} not on this page.`)) : table;
}

// What a step took on every rank, as a stacked bar of phases.
function ranksTable(view) {
  const tables = view.runs.flatMap(({ ranks }, run) => (ranks ? [oneRanksTable(view, ranks, run)] : []));
  return tables.length ? element("div", {}, ...tables) : null;
}

function oneRanksTable(view, ranks, run) {
  const part = (place, attributes = {}) => {
    const made = element("i", { colour: view.colour(place), ...attributes });
    made.dataset.colour = place;
    return made;
  };
  const total = ([, ...times]) => times.reduce((sum, time) => sum + time, 0);
  const longest = Math.max(...ranks.rows.map(total)) || 1;
  const rows = ranks.rows.map((row) => {
    const slow = ranks.slow && ranks.slow[0] === row[0];
    const bar = element("div", { class: "phases" }, ...ranks.phases.map(([name, place], i) => {
      const made = part(place, { title: `${name} ${row[i + 1].toFixed(1)} ms` });
      made.style.width = `${(100 * row[i + 1]) / longest}%`;
      return made;
    }));
    const times = ranks.phases.map(([name], i) => cell(row[i + 1].toFixed(1), `number ${slow && ranks.slow[1] === name ? "nan" : ""}`));
    return element("tr", {}, cell(String(row[0]), slow ? "nan" : ""), element("td", { class: "wide" }, bar), cell(total(row).toFixed(1), "number"), ...times);
  });
  const head = element("tr", {}, element("th", {}, "Rank"), element("th", {}, `${view.runs[run].name}, step ${ranks.step}, ${ranks.of} ranks`), element("th", { class: "number" }, "ms per step"),
    ...ranks.phases.map(([name, place]) => element("th", { class: "number" }, part(place, { class: "key" }), name)));
  const table = element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
  return ranks.message ? element("div", {}, table, element("p", { class: "muted" }, `Step ${ranks.message[0]}: ${ranks.message[1]}`)) : table;
}

function configTable(view) {
  const sources = view.runs.map((run) => ({ ...run.config, ...Object.fromEntries(Object.entries(run.facts).map(([key, value]) => [`\0${key}`, value])) }));
  const keys = [...new Set(sources.flatMap(Object.keys))];
  if (!keys.length) return null;
  const differs = (key) => sources.some((source) => source[key] !== sources[0][key]);
  const some = view.runs.length > 1 && keys.some(differs);
  const ordered = [...keys.filter(differs), ...keys.filter((key) => !differs(key))];
  const rows = ordered.map((key) => {
    const marked = some && differs(key);
    const row = element("tr", { class: marked ? "differs" : "same" }, element("td", { class: key[0] === "\0" ? "muted" : "" }, key.replace("\0", "")));
    row.append(...sources.map((source) => cell(Object.hasOwn(source, key) ? source[key] : "–", "wrap")));
    return row;
  });
  const head = element("tr", {}, element("th", {}, "Setting"), ...view.runs.map((_, run) => element("th", {}, runName(view, run))));
  const table = element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
  if (!some) return table;
  const only = element("button", { type: "button", "aria-pressed": "false" }, "Only differences");
  only.addEventListener("click", () => {
    const on = only.getAttribute("aria-pressed") !== "true";
    only.setAttribute("aria-pressed", on);
    for (const row of rows) if (row.className === "same") row.style.display = on ? "none" : "";
  });
  return element("div", {}, element("div", { class: "tools" }, only), table);
}

function textTable(view, data) {
  if (!data.texts.length) return null;
  const rows = data.texts.map((text) => {
    const row = element("tr", {}, element("td", {}, runName(view, text.run)), cell(text.step === null ? "–" : formatNumber(text.step), "number"), cell(text.name), cell(text.text, "wrap"));
    row.dataset.run = text.run;
    return row;
  });
  const head = element("tr", {}, element("th", {}, "Run"), element("th", { class: "number" }, "Step"), element("th", {}, "Name"), element("th", {}, "Text"));
  const table = element("div", { class: "scroll" }, element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows)));
  if (!data.textsLeftOut) return table;
  return element("div", {}, table, element("p", { class: "muted" }, `${data.textsLeftOut.toLocaleString("en-US")} earlier texts are not on this page.`));
}
