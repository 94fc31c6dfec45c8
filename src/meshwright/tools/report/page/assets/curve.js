// The points of one run in one chart, on every axis, and the colours of runs.

const COLOURS = {
  // Chosen so that any two can be told apart with every common kind of colour blindness, which a test computes. The
  // first five are the furthest apart; from the ninth run on, lines are dashed.
  light: ["#1f4dd7", "#b8401c", "#07a566", "#934e8f", "#d28300", "#3c86fd", "#6d1f3f", "#403487"],
  dark: ["#4a97dc", "#ee7638", "#56e891", "#f098b7", "#e9d81e", "#b5c3ff", "#ac6291", "#8a6dff"],
};
const DASHES = [[], [7, 4], [2, 3]];

class Curve {
  constructor(spec, run, arrays) {
    this.run = spec.run;
    this.spec = spec;
    this.segments = run.segments;
    this.arrays = arrays;
    this.cache = {};
  }

  // The points on one axis: x and y as drawn, and mx and my, from which the smoothed curve is made.
  on(axis) {
    if (!this.cache[axis]) {
      const shown = this.place(this.spec.shown, axis);
      const means = this.spec.means ? this.place(this.spec.means, axis) : shown;
      const marks = this.spec.marks ? this.place(this.spec.marks, axis).x : [];
      this.cache[axis] = { x: shown.x, y: shown.y, mx: means.x, my: means.y, marks };
    }
    return this.cache[axis];
  }

  place([step, time, value], axis) {
    let y = this.arrays[value];
    let x = axis === "step" ? this.arrays[step] : Float64Array.from(this.arrays[time], axis === "wall" ? (t) => this.segments[0][0] + t : (t) => this.relative(t));
    if (x.some((at, i) => i > 0 && at < x[i - 1])) {
      const order = Array.from(x.keys()).sort((a, b) => x[a] - x[b]);
      x = Float64Array.from(order, (i) => x[i]);
      y = Float64Array.from(order, (i) => y[i]);
    }
    return { x, y };
  }

  // Where something that happened at a time and a step is on an axis.
  placeOf({ step, time }, axis) {
    return axis === "step" ? step : axis === "wall" ? time : this.relative(time - this.segments[0][0]);
  }

  // Time since the start, without the pauses between an interruption and a resume.
  relative(time) {
    const at = this.segments[0][0] + time;
    let before = 0;
    for (let i = 0; i < this.segments.length; i++) {
      const [begin, end] = this.segments[i];
      if (i + 1 === this.segments.length || at < this.segments[i + 1][0]) return before + Math.max(0, Math.min(at, end) - begin);
      before += end - begin;
    }
    return before;
  }

  smooth(axis, memory, fence) {
    const key = `${axis} ${memory} ${fence}`;
    if (this.smoothKey !== key) {
      const { mx, my } = this.on(axis);
      this.smoothKey = key;
      this.smoothValues = smoothed(mx, my, memory, fence);
    }
    return this.smoothValues;
  }
}
