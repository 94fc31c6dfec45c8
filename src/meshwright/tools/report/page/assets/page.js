// The page: its state (selection, pointer, zoom) and the scheduling of redraws.

const root = document.documentElement;
const byId = (id) => document.getElementById(id);
const FRAME_SHARE = 7;
const FOLDED = "meter";
const failures = [];
const fail = (message) => { failures.push(String(message)); root.dataset.errors = failures.length; root.dataset.firstError = failures[0]; };
window.addEventListener("error", (event) => fail(event.message));
window.addEventListener("unhandledrejection", (event) => fail(event.reason));
document.addEventListener("securitypolicyviolation", (event) => fail(`refused: ${event.violatedDirective}`));
root.dataset.errors = 0;

const data = JSON.parse(byId("data").textContent);
byId("data").remove();
data.arrays = data.arrays.map(unpack);
const count = (n, word) => `${n.toLocaleString("en-US")} ${word}${n === 1 ? "" : "s"}`;

class View {
  constructor(runs) {
    Object.assign(this, { runs, charts: [], axis: "step", smoothing: 0.2, log: false, clip: true });
    Object.assign(this, { zoom: null, hidden: new Set(), focus: null, pointer: null, version: 0, full: [0, 1] });
    this.readInk();
  }

  get dark() { return (root.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark"; }
  colour(run) { return this.palette[run % this.palette.length]; }
  dash(run) { return DASHES[Math.floor(run / this.palette.length) % DASHES.length]; }

  readInk() {
    this.palette = COLOURS[this.dark ? "dark" : "light"];
    const probe = document.body.appendChild(element("i"));
    const read = (name) => { probe.style.color = `var(--${name})`; return getComputedStyle(probe).color; };
    this.ink = Object.fromEntries(["muted", "grid", "line", "accent", "card", "ink", "good", "bad"].map((name) => [name, read(name)]));
    probe.remove();
  }

  // The axis that the charts share, over all runs that are shown.
  measure() {
    const domains = this.charts.map((chart) => chart.own()).filter(([low, high]) => low <= high);
    this.full = domains.length ? [Math.min(...domains.map((d) => d[0])), Math.max(...domains.map((d) => d[1]))] : [0, 1];
  }

  change() {
    this.version++;
    this.measure();
    byId("reset").hidden = !this.zoom && !this.charts.some((chart) => chart.zoom);
    this.soon();
  }

  // Draw in the next frame. What takes longer than a part of a frame goes on in the one after it, so that scrolling
  // and sliders never wait for a page full of charts.
  soon() {
    if (this.asked) return;
    this.asked = true;
    requestAnimationFrame(() => {
      this.asked = false;
      const end = performance.now() + FRAME_SHARE;
      for (const chart of this.active()) {
        if (!chart.visible) continue;
        if (chart.drawn === this.version) chart.drawOver();
        else if (performance.now() < end) chart.draw();
        else this.soon();
      }
    });
  }

  active() { return this.largest ? [...this.charts, this.largest] : this.charts; }

  setZoom(domain) { this.zoom = domain; this.change(); }

  point(chart, x, event) {
    this.pointer = chart && { chart, x };
    this.soon();
    const tip = byId("tooltip");
    tip.hidden = !chart;
    if (!chart) return;
    const where = this.axis === "step" ? `step ${formatNumber(this.snapped(chart, x))}` : this.axis === "relative" ? formatDuration(x) : formatClock(x);
    const rows = chart.readings(x).sort((a, b) => b.value - a.value).slice(0, 16).flatMap(({ curve, value, raw }) => [
      element("span", { class: "dot", colour: this.colour(curve.run) }),
      element("span", { class: "tip-name" }, this.runs[curve.run].name),
      element("span", { class: "value" }, inUnit(chart.spec.unit)(value)),
      element("span", { class: "muted" }, raw === null ? "" : inUnit(chart.spec.unit)(raw)),
    ]);
    const changes = chart.changesAt(x).slice(0, 4).map(({ kind, text, count }) => element("p", { class: `change ${kind}` }, `${text}; ${count} replicas`));
    tip.replaceChildren(element("strong", {}, where), element("div", {}, ...rows), ...changes);
    (chart.large ? byId("large") : document.body).append(tip);
    const left = event.clientX + 16 + tip.offsetWidth > innerWidth ? event.clientX - tip.offsetWidth - 16 : event.clientX + 16;
    tip.style.transform = `translate(${Math.max(4, left)}px, ${Math.max(4, Math.min(innerHeight - tip.offsetHeight - 8, event.clientY + 14))}px)`;
  }

  snapped(chart, x) {
    const near = chart.readings(x).map((reading) => reading.x);
    const best = near.length ? near.reduce((a, b) => (Math.abs(b - x) < Math.abs(a - x) ? b : a)) : x;
    return Math.round(best);
  }

  enlarge(spec) {
    this.largest = new Chart(spec, this, true);
    const close = element("button", { type: "button", click: () => byId("large").close() }, "Close");
    const save = element("button", { type: "button", click: () => savePicture(this.largest) }, "Save PNG");
    this.largest.head.append(save, close);
    byId("large").replaceChildren(this.largest.card);
    byId("large").showModal();
    byId("large").focus();
    this.point(null);
  }
}

function savePicture(chart) {
  const ratio = window.devicePixelRatio || 1, top = 52;
  const picture = element("canvas", { width: chart.base.width, height: chart.base.height + top * ratio });
  const pen = picture.getContext("2d"), view = chart.view;
  pen.fillStyle = view.ink.card;
  pen.fillRect(0, 0, picture.width, picture.height);
  pen.drawImage(chart.base, 0, top * ratio);
  pen.scale(ratio, ratio);
  pen.fillStyle = view.ink.ink;
  pen.font = "600 15px system-ui, sans-serif";
  pen.fillText(chart.spec.name, 12, 21);
  pen.font = "12px system-ui, sans-serif";
  let x = 12;
  for (const curve of chart.shown()) {
    const name = view.runs[curve.run].name;
    pen.fillStyle = view.colour(curve.run);
    pen.fillRect(x, 36, 14, 4);
    pen.fillStyle = view.ink.muted;
    pen.fillText(name, x + 19, 42);
    x += 36 + pen.measureText(name).width;
  }
  picture.toBlob((blob) => {
    const link = element("a", { href: URL.createObjectURL(blob), download: `${chart.spec.name.replace(/[^\w.-]+/g, "_")}.png` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}

const view = new View(data.runs);
for (const chart of data.charts) chart.curves = chart.curves.map((curve) => new Curve(curve, data.runs[curve.run], data.arrays));

function fillHeader() {
  byId("title").textContent = data.title;
  byId("subtitle").textContent = `${count(data.runs.length, "run")} · ${count(data.charts.length, "metric")} · ${formatClock(data.made).slice(0, 16)}`;
  const chips = data.runs.map((run, number) => {
    const chip = element("button", { type: "button", class: "chip", "aria-pressed": "true", title: `${run.path}\nclick: show or hide; shift-click: only this run` },
      element("span", { class: "dot", colour: view.colour(number) }), element("span", {}, run.name));
    chip.firstChild.dataset.run = number;
    chip.addEventListener("click", (event) => {
      if (event.shiftKey) choose((other) => other === number);
      else choose((other) => (other === number) === view.hidden.has(other) ? true : other === number ? false : !view.hidden.has(other));
    });
    chip.addEventListener("pointerenter", () => focusOn(view.hidden.has(number) ? null : number));
    chip.addEventListener("pointerleave", () => focusOn(null));
    return chip;
  });
  const choose = (shown) => {
    const next = data.runs.map((_, number) => Boolean(shown(number)));
    view.hidden = new Set(next.flatMap((on, number) => (on ? [] : [number])));
    chips.forEach((chip, number) => chip.setAttribute("aria-pressed", next[number]));
    for (const row of document.querySelectorAll("tr[data-run]")) row.classList.toggle("hidden-run", view.hidden.has(Number(row.dataset.run)));
    view.focus = null;
    view.change();
  };
  byId("chips").append(...chips);
  if (chips.length > 2) {
    byId("chips").append(element("button", { type: "button", class: "plain", click: () => choose(() => true) }, "all"),
      element("button", { type: "button", class: "plain", click: () => choose(() => false) }, "none"));
  }
}

function focusOn(run) { if (view.focus !== run && data.runs.length > 1) { view.focus = run; view.version++; view.soon(); } }

function fillCharts() {
  const groups = new Map();
  for (const spec of data.charts) {
    if (!groups.has(spec.group)) groups.set(spec.group, []);
    groups.get(spec.group).push(spec);
  }
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries) entry.target.chart.show(entry.isIntersecting);
    view.soon();
  }, { rootMargin: "300px 0px" });
  for (const [name, specs] of groups) {
    const charts = specs.map((spec) => new Chart(spec, view));
    view.charts.push(...charts);
    const cards = element("div", { class: "cards" }, ...charts.map((chart) => chart.card));
    const title = name || (groups.size > 1 ? "general" : "metrics");
    byId("groups").append(element("details", { class: `group ${["", "one", "two"][specs.length] || ""}`, open: name !== FOLDED }, element("summary", {}, title, element("span", { class: "muted" }, String(specs.length))), cards));
    for (const chart of charts) { chart.card.chart = chart; seen.observe(chart.card); }
  }
}

function fillTables() {
  byId("summary").append(summaryTable(view, data));
  for (const [id, table] of [["replicas", replicasTable(view)], ["ranks", ranksTable(view)], ["configs", configTable(view)], ["texts", textTable(view, data)]]) {
    if (table) { byId(id).append(table); byId(id).hidden = false; }
  }
}

function fillNotes() {
  const notes = [];
  const longest = Math.max(...data.charts.flatMap((chart) => chart.curves.map((curve) => curve.spec.total)));
  const total = data.charts.flatMap((chart) => chart.curves).reduce((sum, curve) => sum + curve.spec.total, 0);
  if (longest > data.limit) notes.push(`Showing up to ${data.limit.toLocaleString("en-US")} of ${longest.toLocaleString("en-US")} points per curve: every bucket keeps its first, lowest, highest and last value, and the smoothed curve is made of the means of all values. For more, use --points.`);
  else notes.push(`Every one of the ${total.toLocaleString("en-US")} points is on this page.`);
  for (const run of data.runs) {
    if (run.skipped) notes.push(`${run.name}: ${count(run.skipped, "line")} could not be read and ${run.skipped === 1 ? "was" : "were"} skipped; a crash can tear a line.`);
  }
  for (const run of data.runs) if (run.lost.length) notes.push(`${run.name}: ${run.lost.join(", ")}. A tracker loses what it refuses, what it fails to store, and what comes while its server is too slow.`);
  const resumed = data.runs.filter((run) => run.segments.length > 1).map((run) => run.name);
  if (resumed.length) notes.push(`Resumed: ${resumed.join(", ")}. Steps that were done again are shown as they were done last; Time leaves the pauses out.`);
  notes.push(`Drag over a chart to zoom, double-click to go back, click to enlarge. Made by meshwright ${data.version}; this page loads nothing from anywhere.`);
  byId("notes").append(...notes.map((note) => element("p", {}, note)));
}

function listen() {
  byId("search").addEventListener("input", () => {
    const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const chart of view.charts) chart.card.hidden = !words.every((word) => chart.spec.name.toLowerCase().includes(word));
    for (const group of byId("groups").children) group.hidden = ![...group.querySelectorAll(".card")].some((card) => !card.hidden);
    byId("nothing").hidden = view.charts.some((chart) => !chart.card.hidden);
  });
  const smooth = () => {
    view.smoothing = byId("smoothing").value / 100;
    const share = 25 * view.smoothing ** 2;
    byId("smoothing-value").textContent = view.smoothing ? `${share < 1 ? share.toFixed(1) : Math.round(share)} %` : "off";
    view.change();
  };
  byId("smoothing").addEventListener("input", smooth);
  smooth();
  byId("axis").addEventListener("click", (event) => {
    if (!event.target.dataset.axis) return;
    view.axis = event.target.dataset.axis;
    for (const button of byId("axis").children) button.setAttribute("aria-pressed", button === event.target);
    view.setZoom(null);
  });
  for (const name of ["log", "clip"]) {
    byId(name).addEventListener("click", () => { view[name] = !view[name]; byId(name).setAttribute("aria-pressed", view[name]); view.change(); });
  }
  byId("reset").addEventListener("click", () => { for (const chart of view.charts) chart.zoom = null; view.setZoom(null); });
  byId("theme").addEventListener("click", () => {
    root.dataset.theme = view.dark ? "light" : "dark";
    try { localStorage.setItem("meshwright-report-theme", root.dataset.theme); } catch { /* storage may be disabled for files */ }
    recolour();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", recolour);
  byId("large").addEventListener("close", () => { view.largest = null; view.point(null); document.body.append(byId("tooltip")); });
  byId("large").addEventListener("click", (event) => { if (event.target === byId("large")) byId("large").close(); });
  window.addEventListener("keydown", (event) => {
    if (event.key === "/" && document.activeElement.tagName !== "INPUT") { event.preventDefault(); byId("search").focus(); }
    if (event.key === "Escape" && document.activeElement === byId("search")) byId("search").blur();
  });
  window.addEventListener("beforeprint", () => { for (const chart of view.charts) { chart.show(true); chart.draw(); } });
  new ResizeObserver(() => { view.version++; view.soon(); }).observe(byId("groups"));
  new ResizeObserver(() => { view.version++; view.soon(); }).observe(byId("large"));
}

function recolour() {
  view.readInk();
  view.point(null);
  for (const dot of document.querySelectorAll(".dot[data-run]")) dot.style.backgroundColor = dot.style.borderColor = view.colour(Number(dot.dataset.run));
  for (const part of document.querySelectorAll("[data-colour]")) part.style.backgroundColor = view.colour(Number(part.dataset.colour));
  view.version++;
  view.soon();
}

try { root.dataset.theme = localStorage.getItem("meshwright-report-theme") || ""; } catch { root.dataset.theme = ""; }
view.readInk();
fillHeader();
fillCharts();
fillTables();
fillNotes();
listen();
root.dataset.charts = view.charts.length;
