// One metric: a canvas with the curves, and a second one above it for the pointer.

const LEFT = 56, RIGHT = 10, TOP = 8, BOTTOM = 22;
const FONT = '11px system-ui, -apple-system, "Segoe UI", Roboto, "Liberation Sans", sans-serif';
const FEW_POINTS = 60;

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "colour") made.style.backgroundColor = made.style.borderColor = value;
    else if (typeof value === "function") made.addEventListener(name, value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children);
  return made;
}

class Chart {
  constructor(spec, view, large = false) {
    Object.assign(this, { spec, view, large, visible: large, drawn: -1, fence: [-Infinity, Infinity], drag: null, zoom: null });
    this.curves = spec.curves;
    const bad = this.curves.reduce((sum, curve) => sum + (curve.spec.bad || 0), 0);
    this.base = element("canvas");
    this.over = element("canvas");
    this.plot = element("div", { class: "plot" }, this.base, this.over);
    this.readout = element("div", { class: "readout" });
    this.head = element("div", { class: "head" }, element("h3", { title: spec.name }, spec.name));
    if (bad) this.head.append(element("span", { class: "badge", title: "marked at the lower axis" }, `${bad.toLocaleString("en-US")} not finite`));
    if (!large) this.head.append(element("button", { type: "button", title: "enlarge", "aria-label": `enlarge ${spec.name}`, click: () => view.enlarge(spec) }, "⤢"));
    this.card = element("article", { class: "card" }, this.head, this.readout, this.plot);
    this.values = this.curves.map((curve) => {
      const text = document.createTextNode("");
      const name = view.runs[curve.run].name;
      const item = element("span", { title: name }, element("i"), element("span", { class: "run" }, name), element("span", { class: "now" }, text));
      this.readout.append(item);
      return { item, text };
    });
    this.listen();
  }

  listen() {
    const { plot, view } = this;
    const at = (event) => event.clientX - plot.getBoundingClientRect().left;
    plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !this.scale) return;
      plot.setPointerCapture(event.pointerId);
      this.drag = { from: at(event), to: at(event) };
    });
    plot.addEventListener("pointermove", (event) => {
      if (!this.scale) return;
      const x = at(event);
      if (this.drag) this.drag.to = x;
      view.point(this, this.scale.backX(Math.max(LEFT, Math.min(this.width - RIGHT, x))), event);
    });
    plot.addEventListener("pointerleave", () => view.point(null));
    plot.addEventListener("pointercancel", () => { this.drag = null; view.point(null); });
    plot.addEventListener("pointerup", () => {
      if (!this.drag) return;
      const ends = [this.drag.from, this.drag.to].sort((a, b) => a - b);
      this.drag = null;
      if (ends[1] - ends[0] > 5) this.setZoom(ends.map((x) => this.scale.backX(x)));
      else this.click();
    });
    plot.addEventListener("dblclick", () => { clearTimeout(this.waiting); this.setZoom(null); });
  }

  // A click enlarges. Where a double click would mean something else, it waits for the second one.
  click() {
    if (this.large) return;
    clearTimeout(this.waiting);
    this.waiting = setTimeout(() => this.view.enlarge(this.spec), this.domainZoom() ? 280 : 0);
  }

  setZoom(domain) {
    if (this.shares()) this.view.setZoom(domain);
    else { this.zoom = domain && { axis: this.view.axis, domain }; this.view.change(); }
  }

  domainZoom() {
    if (this.shares()) return this.view.zoom;
    return this.zoom && this.zoom.axis === this.view.axis ? this.zoom.domain : null;
  }

  shown() { return this.curves.filter((curve) => !this.view.hidden.has(curve.run)); }

  own() {
    const domain = [Infinity, -Infinity];
    for (const curve of this.shown()) {
      const { x } = curve.on(this.view.axis);
      if (x.length) { domain[0] = Math.min(domain[0], x[0]); domain[1] = Math.max(domain[1], x[x.length - 1]); }
    }
    return domain;
  }

  // Charts whose axis counts something else, such as epochs, keep an axis of their own.
  shares() {
    const own = this.own(), full = this.view.full;
    return own[1] - own[0] >= (full[1] - full[0]) / 4 || own[0] > own[1];
  }

  soft() { return this.view.smoothing > 0 && !this.spec.exact; }

  // The window of the smoothed curve: a share of the longest run, independent of the zoom.
  memory() {
    const lengths = this.shown().map((curve) => curve.on(this.view.axis).x).map((x) => (x.length ? x[x.length - 1] - x[0] : 0));
    return Math.max(1e-12, Math.max(...lengths) * 0.25 * this.view.smoothing ** 2);
  }

  domain() {
    const zoom = this.domainZoom();
    if (zoom) return zoom;
    const [low, high] = this.shares() ? this.view.full : this.own();
    return high > low ? [low, high] : [low - 1, high + 1];
  }

  range(domain, log) {
    const found = [];
    let left = 0;
    for (const curve of this.shown()) {
      const { x, y } = curve.on(this.view.axis);
      const to = Math.min(x.length, firstFrom(x, domain[1]) + 1);
      for (let i = Math.max(0, firstFrom(x, domain[0]) - 1); i < to; i++) {
        if (!Number.isFinite(y[i])) continue;
        if (log && y[i] <= 0) left++; else found.push(y[i]);
      }
    }
    if (!found.length) return { empty: true, left };
    const fence = this.fence = this.view.clip ? outlierFence(found, log) : [-Infinity, Infinity];
    let low = Infinity, high = -Infinity, outside = 0;
    for (const v of found) {
      if (v < fence[0] || v > fence[1]) { outside++; continue; }
      if (v < low) low = v;
      if (v > high) high = v;
    }
    if (log) {
      const pad = Math.max(0.02, 0.05 * Math.log10(high / low));
      return { low: low / 10 ** pad, high: high * 10 ** pad, left, outside };
    }
    const pad = (high - low) * 0.06 || (this.spec.unit === "clock" ? 60 : Math.abs(high) * 0.1) || 1;
    const least = this.spec.unit === "duration" && low >= 0 ? 0 : -Infinity;
    return { low: Math.max(least, low - pad), high: high + pad, left, outside };
  }

  fit() {
    const box = this.plot.getBoundingClientRect();
    const ratio = window.devicePixelRatio || 1;
    this.width = box.width;
    this.height = box.height;
    for (const canvas of [this.base, this.over]) {
      const width = Math.round(box.width * ratio), height = Math.round(box.height * ratio);
      if (canvas.width !== width || canvas.height !== height) { canvas.width = width; canvas.height = height; }
      canvas.getContext("2d").setTransform(ratio, 0, 0, ratio, 0, 0);
    }
  }

  draw() {
    if (this.drawn === this.view.version || !this.visible) return;
    this.drawn = this.view.version;
    this.fit();
    const { view, spec, width, height } = this, ink = view.ink;
    const pen = this.base.getContext("2d");
    const domain = this.domain(), log = view.log && spec.unit !== "clock", range = this.range(domain, log);
    pen.clearRect(0, 0, width, height);
    pen.font = FONT;
    this.scale = null;
    if (range.empty) {
      pen.fillStyle = ink.muted;
      pen.textAlign = "center";
      pen.fillText(range.left ? "no value above zero here: nothing to show on a log axis" : "no points here", width / 2, height / 2);
    } else this.drawCurves(pen, domain, range, log);
    if (range.empty && !range.left) this.scale = this.scales(domain, { low: 0, high: 1 }, false);
    this.drawOver();
  }

  scales(domain, range, log) {
    const a = (this.width - LEFT - RIGHT) / (domain[1] - domain[0]), b = LEFT - domain[0] * a;
    const high = log ? Math.log(range.high) : range.high, low = log ? Math.log(range.low) : range.low;
    const c = -(this.height - TOP - BOTTOM) / (high - low), d = TOP - high * c;
    return { x: (v) => a * v + b, y: log ? (v) => c * Math.log(v) + d : (v) => c * v + d, backX: (px) => (px - b) / a, domain, log };
  }

  drawCurves(pen, domain, range, log) {
    const { view, width, height } = this, ink = view.ink;
    const scale = (this.scale = this.scales(domain, range, log));
    this.drawAxes(pen, domain, range, log);
    pen.save();
    pen.beginPath();
    pen.rect(LEFT, TOP - 2, width - LEFT - RIGHT, height - TOP - BOTTOM + 4);
    pen.clip();
    pen.lineJoin = "bevel";
    for (const curve of this.shown()) {
      const { x, y, mx } = curve.on(view.axis);
      const dim = view.focus !== null && view.focus !== curve.run;
      pen.strokeStyle = pen.fillStyle = view.colour(curve.run);
      pen.setLineDash(view.dash(curve.run));
      const soft = this.soft() && mx.length > 2;
      pen.globalAlpha = dim ? 0.1 : soft ? 0.2 : 0.95;
      pen.lineWidth = soft ? 1 : 1.3;
      this.trace(pen, x, y, scale);
      if (soft) {
        pen.globalAlpha = dim ? 0.15 : 1;
        pen.lineWidth = 1.8;
        this.trace(pen, mx, curve.smooth(view.axis, this.memory(), this.fence), scale);
      }
    }
    pen.restore();
    this.drawMarks(pen, scale);
    this.drawChanges(pen, scale);
    if (range.outside) this.drawOutliers(pen, scale, range);
    this.outside = range.outside;
    const notes = [];
    if (range.left) notes.push(`${count(range.left, "point")} at or below zero not shown`);
    if (range.outside) notes.push(`${count(range.outside, "outlier")} outside`);
    if (notes.length) {
      pen.fillStyle = ink.muted;
      pen.textAlign = "right";
      pen.textBaseline = "middle";
      pen.fillText(notes.join(", "), width - RIGHT - 4, TOP + 14);
    }
  }

  // An arrow at the edge, in the run's colour, where outliers leave the chart.
  drawOutliers(pen, scale, range) {
    const { x: toX, domain } = scale;
    for (const curve of this.shown()) {
      pen.strokeStyle = this.view.colour(curve.run);
      pen.lineWidth = 1.6;
      pen.beginPath();
      const { x, y } = curve.on(this.view.axis);
      const last = { 1: -99, "-1": -99 };
      for (let i = firstFrom(x, domain[0]); i < x.length && x[i] <= domain[1]; i++) {
        const up = y[i] > range.high ? 1 : y[i] < range.low ? -1 : 0, px = toX(x[i]);
        if (!up || !Number.isFinite(y[i]) || (scale.log && y[i] <= 0) || px - last[up] < 7) continue;
        last[up] = px;
        const tip = up > 0 ? TOP : this.height - BOTTOM - 1;
        pen.moveTo(px - 3.5, tip + 4 * up); pen.lineTo(px, tip); pen.lineTo(px + 3.5, tip + 4 * up);
        pen.moveTo(px, tip); pen.lineTo(px, tip + 9 * up);
      }
      pen.stroke();
    }
  }

  trace(pen, x, y, scale) {
    const from = Math.max(0, firstFrom(x, scale.domain[0]) - 1);
    const to = Math.min(x.length, firstFrom(x, scale.domain[1]) + 1);
    const good = (i) => i >= from && i < to && Number.isFinite(y[i]) && !(scale.log && y[i] <= 0);
    const few = to - from <= FEW_POINTS;
    const dots = [];
    let open = false;
    pen.beginPath();
    for (let i = from; i < to; i++) {
      if (!good(i)) { open = false; continue; }
      const px = scale.x(x[i]), py = scale.y(y[i]);
      if (open) pen.lineTo(px, py); else pen.moveTo(px, py);
      if (few || (!open && !good(i + 1))) dots.push(px, py);
      open = true;
    }
    pen.stroke();
    pen.beginPath();
    for (let i = 0; i < dots.length; i += 2) { pen.moveTo(dots[i] + 2.2, dots[i + 1]); pen.arc(dots[i], dots[i + 1], 2.2, 0, 7); }
    pen.fill();
  }

  drawAxes(pen, domain, range, log) {
    const { width, height, scale, view } = this, ink = view.ink;
    pen.lineWidth = 1;
    pen.strokeStyle = ink.grid;
    pen.fillStyle = ink.muted;
    pen.textAlign = "right";
    pen.textBaseline = "middle";
    const rows = Math.max(3, Math.min(10, Math.round(height / 36))), columns = Math.max(2, Math.floor(width / 90));
    pen.beginPath();
    for (const tick of this.valueTicks(range, log, rows)) {
      const y = Math.round(scale.y(tick.at)) + 0.5;
      if (y < TOP || y > height - BOTTOM) continue;
      pen.moveTo(LEFT, y);
      pen.lineTo(width - RIGHT, y);
      pen.fillText(tick.text, LEFT - 7, y);
    }
    pen.stroke();
    pen.textBaseline = "top";
    pen.textAlign = "center";
    const ticks = view.axis === "step" ? linearTicks(...domain, columns) : timeTicks(...domain, columns, view.axis === "wall");
    for (const tick of ticks) {
      const half = pen.measureText(tick.text).width / 2;
      const x = Math.max(LEFT, Math.min(width - half - 1, scale.x(tick.at)));
      pen.fillText(tick.text, x, height - BOTTOM + 7);
    }
    pen.strokeStyle = ink.line;
    pen.beginPath();
    pen.moveTo(LEFT, height - BOTTOM + 0.5);
    pen.lineTo(width - RIGHT, height - BOTTOM + 0.5);
    pen.stroke();
  }

  valueTicks({ low, high }, log, rows) {
    const { unit } = this.spec;
    if (log) return logTicks(low, high);
    return unit ? timeTicks(low, high, rows, unit === "clock") : linearTicks(low, high, rows);
  }

  // A small cross at the axis, in the run's colour, where a value was NaN or infinite.
  drawMarks(pen, scale) {
    pen.lineWidth = 1.6;
    for (const curve of this.shown()) {
      pen.strokeStyle = this.view.colour(curve.run);
      pen.beginPath();
      let last = -99;
      for (const at of curve.on(this.view.axis).marks) {
        const x = scale.x(at), y = this.height - BOTTOM;
        if (at < scale.domain[0] || at > scale.domain[1] || x - last < 5) continue;
        last = x;
        pen.moveTo(x - 3, y - 3); pen.lineTo(x + 3, y + 3); pen.moveTo(x + 3, y - 3); pen.lineTo(x - 3, y + 3);
      }
      pen.stroke();
    }
  }

  // Who left and who joined the runs that are shown, with their places on the axis.
  changes() {
    if (this.view.axis === "step" && !this.shares()) return [];
    return this.shown().flatMap((curve) => (this.view.runs[curve.run].replicas?.changes ?? []).map((change) => ({ ...change, x: curve.placeOf(change, this.view.axis) })));
  }

  changesAt(x) {
    const near = this.scale ? 6 * Math.abs(this.scale.backX(1) - this.scale.backX(0)) : 0;
    return this.changes().filter((change) => Math.abs(change.x - x) <= near);
  }

  // A triangle at the upper edge: downward where a replica left, upward where one joined.
  drawChanges(pen, scale) {
    const last = {};
    for (const { kind, x } of this.changes().sort((a, b) => a.x - b.x)) {
      const px = scale.x(x), tip = kind === "joined" ? -1 : 1;
      if (x < scale.domain[0] || x > scale.domain[1] || px - (last[kind] ?? -99) < 4) continue;
      last[kind] = px;
      pen.fillStyle = pen.strokeStyle = kind === "left" ? this.view.ink.bad : kind === "joined" ? this.view.ink.good : this.view.ink.muted;
      pen.globalAlpha = 0.25;
      pen.lineWidth = 1;
      pen.beginPath();
      pen.moveTo(px, TOP);
      pen.lineTo(px, this.height - BOTTOM);
      pen.stroke();
      pen.globalAlpha = 1;
      pen.beginPath();
      pen.moveTo(px - 4, TOP - 4 * tip);
      pen.lineTo(px + 4, TOP - 4 * tip);
      pen.lineTo(px, TOP + 4 * tip);
      pen.fill();
    }
  }

  // What each run has at the pointer: the value drawn in front, and the raw one behind it.
  readings(at) {
    const { view } = this, out = [];
    for (const curve of this.shown()) {
      const { x, y, mx } = curve.on(view.axis);
      if (!x.length) continue;
      const slack = this.scale ? (this.scale.domain[1] - this.scale.domain[0]) * 0.02 : 0;
      if (at < x[0] - slack || at > x[x.length - 1] + slack) continue;
      const i = nearest(x, at);
      const reading = { curve, x: x[i], value: y[i], raw: null };
      if (this.soft() && mx.length > 2) {
        const j = nearest(mx, at);
        Object.assign(reading, { x: mx[j], value: curve.smooth(view.axis, this.memory(), this.fence)[j], raw: y[i] });
      }
      out.push(reading);
    }
    return out;
  }

  drawOver() {
    if (!this.visible) return;
    const { view, width, height, scale } = this, pen = this.over.getContext("2d");
    pen.clearRect(0, 0, width, height);
    const here = view.pointer;
    const readings = here && scale && (here.chart === this || this.shares() === here.chart.shares()) ? this.readings(here.x) : null;
    const by = readings && new Map(readings.map((reading) => [reading.curve, reading.value]));
    this.curves.forEach((curve, i) => {
      const { item, text } = this.values[i];
      item.hidden = view.hidden.has(curve.run);
      item.style.display = item.hidden ? "none" : "";
      item.firstChild.style.backgroundColor = view.colour(curve.run);
      const value = by ? by.get(curve) : curve.spec.last;
      text.data = by && !by.has(curve) ? "–" : inUnit(this.spec.unit, this.large ? say : brief)(value);
    });
    if (!readings) return;
    const x = scale.x(here.x);
    if (x >= LEFT - 1 && x <= width - RIGHT + 1) {
      pen.strokeStyle = view.ink.muted;
      pen.setLineDash([3, 3]);
      pen.beginPath();
      pen.moveTo(Math.round(x) + 0.5, TOP);
      pen.lineTo(Math.round(x) + 0.5, height - BOTTOM);
      pen.stroke();
      pen.setLineDash([]);
    }
    for (const reading of readings) {
      const px = scale.x(reading.x), py = scale.y(reading.value);
      if (!(py > TOP - 4 && py < height - BOTTOM + 4 && px >= LEFT - 3 && px <= width - RIGHT + 3)) continue;
      pen.fillStyle = view.colour(reading.curve.run);
      pen.strokeStyle = view.ink.card;
      pen.lineWidth = 1.5;
      pen.beginPath();
      pen.arc(px, py, 4, 0, 7);
      pen.fill();
      pen.stroke();
    }
    if (this.drag && here.chart === this) {
      pen.fillStyle = view.ink.accent;
      pen.globalAlpha = 0.14;
      pen.fillRect(this.drag.from, TOP, this.drag.to - this.drag.from, height - TOP - BOTTOM);
      pen.globalAlpha = 1;
    }
  }

  // A chart outside the viewport holds no pixels, which saves memory on pages of hundreds.
  show(visible) {
    this.visible = visible;
    if (visible) return;
    this.base.width = this.base.height = this.over.width = this.over.height = 0;
    this.drawn = -1;
  }
}
