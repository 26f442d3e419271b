// The charts of a page, drawn by uPlot. They keep their points here, between refreshes and while
// another page is shown; a message of the server (feed.py) holds everything, or what is new.
// Words of others (names, reasons) are only ever set as text.

import { csv, grouped, stacked } from "./data.js";
import uPlot from "./uPlot.esm.js";

const LANE = 13; // pixels of a row of marks above the curves
const NEAR = 6; // pixels at which a mark is pointed at
const NAMED = 3; // marks of a group that are described one by one
const RECENT = 128; // last points that are never thinned: some of them may be replaced
const ROBUST = { part: 0.02, spans: 1.5, least: 20 }; // see `robust`
const STYLE = `
:host{display:block}
.page{display:grid;grid-template-columns:repeat(12,minmax(0,1fr));gap:.6rem 1rem;
font-family:var(--st-font,sans-serif);color:var(--st-text-color,inherit)}
.bar{grid-column:1/-1;display:flex;flex-wrap:wrap;gap:.3rem .75rem;align-items:center;font-size:.75rem;
margin-bottom:-.3rem}
.kinds{display:flex;flex-wrap:wrap;gap:.3rem}
.kinds button{display:flex;gap:.3rem;align-items:center}.kinds canvas{width:12px;height:12px}
.kinds button[aria-pressed=false]{text-decoration:line-through;border-style:dashed}
.kinds button[aria-pressed=false] canvas{opacity:.3}
.bar button,.save button{font:inherit;color:inherit;background:transparent;cursor:pointer;
border:1px solid var(--st-border-color,#8884);border-radius:.4rem;padding:.1rem .5rem}
.bar>button[aria-pressed=true]{font-weight:700;border-color:currentColor}
.bar span{opacity:.8}
.save{display:flex;gap:.3rem;margin-left:auto}.save button{font-size:.68rem;padding:0 .35rem}
figure{grid-column:span 12;margin:0;min-width:0;position:relative;border-radius:.3rem}
figure.half{grid-column:span 6}figure.quarter{grid-column:span 3}
figure:focus-visible{outline:2px solid var(--st-primary-color,#0072B2);outline-offset:2px}
figcaption{display:flex;justify-content:space-between;gap:.75rem;font-size:.8rem;line-height:1.3}
.title{flex:none;max-width:70%;font-weight:600;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.counts{font-size:.72rem;opacity:.8;text-align:right;white-space:nowrap;overflow:hidden;
text-overflow:ellipsis;min-width:0}
.events{position:absolute;z-index:3;pointer-events:none;display:none;max-width:min(26rem,90%);
padding:.25rem .5rem;font-size:.75rem;overflow-wrap:anywhere;border-radius:.3rem;
background:var(--st-background-color,#fff);border:1px solid var(--st-border-color,#8888)}
.events div+div{border-top:1px solid var(--st-border-color,#8884);margin-top:.2rem}
.spoken{position:absolute;width:1px;height:1px;overflow:hidden;clip-path:inset(50%)}
.uplot,.uplot *{box-sizing:border-box}.uplot{width:min-content;line-height:1.4}
.u-wrap{position:relative;user-select:none}.u-over,.u-under{position:absolute}
.u-under{overflow:hidden}.uplot canvas{display:block;position:relative;width:100%;height:100%}
.u-axis{position:absolute}.u-select{background:#0072B233;position:absolute;pointer-events:none}
.u-cursor-x,.u-cursor-y{position:absolute;left:0;top:0;pointer-events:none;will-change:transform}
.u-hz .u-cursor-x{height:100%;border-right:1px dashed #8A8F98}.u-hz .u-cursor-y{display:none}
.u-cursor-pt{position:absolute;top:0;left:0;border-radius:50%;border:0 solid;pointer-events:none;
will-change:transform;background-clip:padding-box!important}
.u-axis.u-off,.u-select.u-off,.u-cursor-x.u-off,.u-cursor-pt.u-off{display:none}
.u-legend{font-size:.72rem;display:flex;flex-wrap:wrap;gap:0 .9rem;max-width:100%;min-height:1.2rem}
.u-legend tbody{display:contents}.u-legend tr{display:flex;gap:.3rem;align-items:center}
.u-legend th{font-weight:400;padding:0;cursor:pointer;display:flex;gap:.3rem;align-items:center}
.u-legend td{padding:0;min-width:3.4em;font-variant-numeric:tabular-nums}
.u-legend .u-label{max-width:14rem;overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.u-legend .u-marker{width:.9em;height:.5em;background-clip:padding-box!important}
.u-legend .u-off>*{opacity:.45}
@media (max-width:640px){figure,figure.half,figure.quarter{grid-column:1/-1}.hint{display:none}
.counts{display:none}.bar{order:1}figure:not(:first-of-type){order:2}}
`;
const SHAPES = {
  triangle: (p, r) => poly(p, [0, -r, r, r, -r, r]),
  down: (p, r) => poly(p, [0, r, r, -r, -r, -r]),
  diamond: (p, r) => poly(p, [0, -r, r, 0, 0, r, -r, 0]),
  rect: (p, r) => p.rect(-r, -r, 2 * r, 2 * r),
  circle: (p, r) => p.arc(0, 0, r, 0, 2 * Math.PI),
  bell: (p, r) => poly(p, [-r, r * 0.6, -r * 0.6, -r * 0.4, 0, -r, r * 0.6, -r * 0.4, r, r * 0.6, 0, r]),
  flag: (p, r) => poly(p, [-r, -r, r, -r * 0.4, -r * 0.6, r * 0.2, -r * 0.6, r, -r, r]),
  bubble: (p, r) => poly(p, [-r, -r, r, -r, r, r * 0.4, 0, r * 0.4, -r * 0.4, r, -r * 0.4, r * 0.4, -r, r * 0.4]),
  cross: (p, r) => {
    const w = r * 0.4;
    poly(p, [-r, -r + w, -r + w, -r, 0, -w, r - w, -r, r, -r + w, w, 0, r, r - w, r - w, r, 0, w, -r + w, r, -r, r - w, -w, 0]);
  },
};
const NUMBER = new Intl.NumberFormat("en-US"); // to make one takes as long as to format a hundred
const FIVE_DIGITS = new Intl.NumberFormat("en-US", { maximumFractionDigits: 8 });
const pages = new Map(); // by the server's key: what is held outlives the element it is drawn in

export default function ({ data, parentElement, setTriggerValue }) {
  if (!data) return; // only this program was to be loaded
  const message = JSON.parse(data);
  let page = pages.get(message.key);
  if (!page) pages.set(message.key, (page = new Page()));
  page.show(parentElement, setTriggerValue);
  page.take(message);
  return () => page.hide(parentElement);
}

class Page {
  constructor() {
    this.held = ""; // name and number of the last message
    this.charts = [];
    this.marks = []; // [kind, place, words, charts as bits, number]
    this.kinds = {};
    this.hidden = new Set(); // kinds that are switched off
    this.palette = { light: [], dark: [] };
    this.zoom = {}; // by axis: [first, last], as long as somebody looks at a part
    this.isFull = false; // whether every value is to be within the y axes
    this.resized = new ResizeObserver(() => this.resize());
    // What nobody sees is not drawn again until somebody does: a refresh of all costs three times as much.
    this.seen = new IntersectionObserver((entries) => this.onVisibility(entries));
  }

  show(root, tell) {
    this.tell = tell;
    if (this.root === root) return;
    this.root = root;
    root.querySelectorAll(".page,style").forEach((old) => old.remove());
    const style = element("style");
    style.textContent = STYLE;
    this.box = element("div", "page");
    this.spoken = element("div", "spoken");
    this.spoken.setAttribute("aria-live", "polite");
    root.append(style, this.box);
    this.bar();
    this.resized.disconnect();
    this.resized.observe(this.box);
    this.seen.disconnect();
    this.charts.forEach((chart) => (chart.plot = null));
    if (this.charts.length) this.build();
  }

  hide(root) {
    if (this.root !== root) return;
    this.resized.disconnect();
    this.seen.disconnect();
    this.charts.forEach((chart) => chart.drop());
    this.root = null;
  }

  bar() {
    const bar = element("div", "bar");
    const back = button("Reset zoom", () => this.unzoom());
    this.full = button("Full y range", () => {
      this.isFull = !this.isFull;
      this.full.setAttribute("aria-pressed", this.isFull);
      this.redraw();
    });
    this.full.title = "Without it a few far values are marked at the edge, so that the others can be read";
    this.full.setAttribute("aria-pressed", this.isFull);
    const hint = element("span", "hint");
    hint.textContent = "Drag to zoom, double-click to reset; arrow keys move the cursor";
    this.legend = element("div", "kinds");
    bar.append(back, this.full, this.legend, hint, this.spoken);
    this.box.append(bar);
  }

  // A switch for each kind of mark, with its shape and number.
  names() {
    const nums = {};
    this.marks.forEach(([kind, , , , num]) => (nums[kind] = (nums[kind] ?? 0) + num));
    const text = JSON.stringify(nums);
    if (!this.root || (text === this.named && this.legend.childElementCount)) return;
    this.named = text;
    this.legend.replaceChildren(
      ...Object.entries(nums).map(([kind, num]) => {
        const made = button("", () => {
          if (!this.hidden.delete(kind)) this.hidden.add(kind);
          made.setAttribute("aria-pressed", !this.hidden.has(kind));
          this.build(); // the rows of marks are others
        });
        made.title = "Show or hide these marks";
        made.setAttribute("aria-pressed", !this.hidden.has(kind));
        made.append(glyph(this.kinds[kind]), `${kind} (${whole(num)})`);
        return made;
      }),
    );
  }

  take(message) {
    const held = `${message.name}/${message.number}`;
    if (held === this.held) return this.restyle();
    if (message.base === 0) this.whole(message);
    else if (`${message.name}/${message.base}` === this.held) this.add(message);
    else return this.tell("missed", `${this.held} of ${held}`);
    this.held = held;
  }

  whole(message) {
    this.kinds = message.kinds;
    this.marks = message.marks;
    this.palette = message.look;
    this.zoom = {};
    this.charts.forEach((chart) => chart.drop());
    this.charts = message.charts.map((chart, i) => new Chart(this, i, chart));
    this.build();
  }

  add(message) {
    Object.assign(this.kinds, message.kinds);
    const gone = new Set(message.gone);
    const before = this.rows();
    this.marks = this.marks.filter((_, i) => !gone.has(i)).concat(message.marks ?? []);
    for (const [i, j, replaced, xs, y, total, bad] of message.lines ?? [])
      this.charts[i].lines[j].add(replaced, message.xs[xs], y, total, bad);
    const ends = message.ends ?? [];
    this.charts.forEach((chart, i) => {
      if (ends.length) chart.ends = ends.length === 1 ? ends[0] : ends[i];
      chart.trim();
    });
    if (before !== this.rows()) return this.build(); // it needs room for another row of marks
    this.names();
    this.redraw();
  }

  rows() {
    return new Set(this.marks.map((mark) => this.kinds[mark[0]].lane)).size;
  }

  build() {
    if (!this.root) return;
    this.names();
    this.seen.disconnect();
    this.box.querySelectorAll("figure").forEach((old) => old.remove());
    this.colours();
    this.box.append(...this.charts.map((chart) => chart.frame()));
    // All are measured before any is drawn: each change in between would cost a layout of the page.
    const widths = this.charts.map((chart) => chart.width());
    this.charts.forEach((chart, i) => chart.draw(widths[i]));
    this.charts.forEach((chart) => this.seen.observe(chart.figure));
  }

  onVisibility(entries) {
    for (const { target, isIntersecting } of entries) {
      const chart = this.charts.find((each) => each.figure === target);
      if (!chart) continue;
      chart.isSeen = isIntersecting;
      if (isIntersecting && chart.isOld) chart.redraw();
    }
  }

  redraw(axis) {
    if (!this.root) return;
    for (const chart of this.charts) {
      if (axis && chart.axis !== axis) continue;
      if (chart.isSeen) chart.redraw();
      else chart.isOld = true;
    }
  }

  restyle() {
    const before = this.isDark;
    this.colours();
    if (before !== this.isDark) this.build();
  }

  colours() {
    const style = getComputedStyle(this.box);
    const [r, g, b] = (style.getPropertyValue("--st-background-color").match(/[0-9a-f]{2}/gi) ?? ["ff", "ff", "ff"])
      .map((part) => parseInt(part, 16));
    this.isDark = r * 0.3 + g * 0.6 + b * 0.1 < 128;
    this.font = `11px ${style.fontFamily}`;
    this.ink = style.color;
    this.ground = style.getPropertyValue("--st-background-color") || "#ffffff";
    this.lines = this.isDark ? this.palette.dark : this.palette.light;
    this.faint = this.isDark ? "#9AA2AE" : "#7B828D";
    this.grid = "rgba(128,136,148,0.20)";
  }

  resize() {
    this.charts.forEach((chart) => chart.resize());
  }

  zoomTo(axis, first, last) {
    if (!(last > first)) return;
    this.zoom[axis] = [first, last];
    this.redraw(axis);
    this.report(axis, { axis, first, last });
  }

  unzoom() {
    const axes = Object.keys(this.zoom);
    this.zoom = {};
    this.redraw();
    this.report("", { axis: axes[0] ?? this.charts[0]?.axis ?? "step", first: null, last: null });
  }

  // The server may have more points of a part; it is told once the person has stopped choosing.
  report(axis, chosen) {
    clearTimeout(this.later);
    this.later = setTimeout(() => this.root && this.tell("range", chosen), 400);
  }
}

class Line {
  constructor(wire, [name, role, colour]) {
    Object.assign(this, { name, role, colour, y: wire.y, total: wire.total, bad: wire.bad });
    let at = wire.from?.[0];
    this.x = wire.x ?? (at === undefined ? [] : [at, ...wire.by.map((by) => (at += by))]);
    this.room = Math.max(2 * this.x.length, 2000);
  }

  add(replaced, x, y, total, bad) {
    const keep = replaced === null ? 0 : Math.max(0, this.x.length - replaced);
    for (const list of [this.x, this.y]) list.length = Math.min(list.length, keep);
    this.x.push(...x);
    this.y.push(...y);
    this.total = total;
    this.bad = bad;
  }

  // Leaves out what lies before the first place shown, and thins what stands too densely: of each
  // part of x the least and the greatest value and each gap stay.
  trim(first) {
    let cut = 0;
    if (this.role !== "discarded") while (cut < this.x.length && this.x[cut] < first) cut++;
    if (cut) this.keep([...this.x.keys()].slice(cut));
    if (this.x.length > this.room) this.keep(densest(this.x, this.y, this.room / 4));
  }

  keep(which) {
    for (const name of ["x", "y"]) this[name] = which.map((i) => this[name][i]);
  }
}

function densest(x, y, parts) {
  const end = Math.max(0, x.length - RECENT);
  const width = (x[x.length - 1] - x[0]) / parts;
  const kept = [];
  for (let i = 0; i < end; ) {
    const part = Math.floor((x[i] - x[0]) / width);
    let [low, high, gap] = [-1, -1, -1];
    for (; i < end && Math.floor((x[i] - x[0]) / width) === part; i++) {
      if (y[i] === null) gap = gap < 0 ? i : gap;
      else {
        if (low < 0 || y[i] < y[low]) low = i;
        if (high < 0 || y[i] > y[high]) high = i;
      }
    }
    kept.push(...[...new Set([low, high, gap])].filter((j) => j >= 0).sort((a, b) => a - b));
  }
  for (let i = end; i < x.length; i++) kept.push(i);
  return kept;
}

class Chart {
  constructor(page, index, wire) {
    const { title, axis, unit, log, exact, size, height, note, ends } = wire;
    Object.assign(this, { page, index, title, axis, unit, log, exact, size, height, note, ends });
    this.lines = wire.lines.map((line, i) => new Line(line, wire.curves[i]));
    this.plot = null;
    this.isSeen = true;
    this.isOld = false;
  }

  get marks() {
    const { hidden, marks } = this.page;
    return marks.filter((mark) => !hidden.has(mark[0]) && Math.floor(mark[3] / 2 ** this.index) % 2);
  }

  trim() {
    const first = this.ends?.[0] ?? -Infinity;
    this.lines.forEach((line) => line.trim(first));
  }

  frame() {
    this.figure = element("figure", this.size);
    this.figure.tabIndex = 0;
    this.figure.setAttribute("role", "group");
    this.figure.setAttribute("aria-roledescription", "chart");
    const caption = element("figcaption");
    const title = element("span", "title");
    title.textContent = this.title;
    this.counts = element("span", "counts");
    const save = element("span", "save");
    for (const [kind, write] of [["PNG", () => this.image()], ["CSV", () => this.table()]]) {
      const made = button(kind, write);
      made.setAttribute("aria-label", `Save ${this.title} as ${kind}`);
      save.append(made);
    }
    caption.append(title, this.counts, save);
    this.events = element("div", "events");
    this.figure.append(caption, this.events);
    this.figure.addEventListener("keydown", (event) => this.key(event));
    return this.figure;
  }

  // ---------------------------------------------------------------------------------- drawing

  series() {
    const { page } = this;
    const means = new Set(this.lines.filter((line) => line.role === "mean").map((line) => line.colour));
    const result = [{ label: this.unit, value: (_, v) => this.place(v ?? this.last) }];
    this.lines.forEach((line) => {
      const isMain = line.role === "main";
      const isBehind = isMain && means.has(line.colour);
      const colour = this.colour(line);
      const series = {
        label: line.name, stroke: colour, show: this.isShown(line), spanGaps: false, value: (_, v, s, i) => this.value(s, i),
        width: line.role === "mean" ? 2 : 1, // without a GPU, one of a pixel is drawn ten times as fast as a wider one
        points: { size: 4, fill: colour, filter: lone },
        alpha: line.role === "discarded" ? (line.colour < 0 ? 0.8 : 0.45) : isBehind ? 0.4 : 1,
      };
      if (line.role === "part") series.fill = colour;
      if (line.role === "band") Object.assign(series, { width: 0, points: { show: false } });
      if (this.bands().some((band) => band.series[0] === result.length)) series.fill = `${colour}33`;
      if (line.role === "limit")
        Object.assign(series, { dash: [5, 4], paths: uPlot.paths.stepped({ align: 1 }) });
      result.push(series);
    });
    return result;
  }

  colour(line) {
    const { faint, lines } = this.page;
    return line.colour < 0 ? faint : lines[line.colour % lines.length];
  }

  data() {
    const tables = this.lines.map((line) => [line.x, line.y]);
    if (!tables.length) return (this.drawn = this.measured = [[]]);
    const [x] = tables[0];
    const isSame = tables.every(([other]) => other === x || (other.length === x.length && other.every((v, i) => v === x[i])));
    this.measured = isSame ? [x, ...tables.map(([, y]) => y)] : uPlot.join(tables);
    const parts = this.lines.map((line, i) => [line, i + 1]).filter(([line]) => line.role === "part" && this.isShown(line));
    const sums = stacked(parts.map(([, i]) => this.measured[i]));
    this.drawn = [...this.measured];
    parts.forEach(([, i], j) => (this.drawn[i] = sums[j]));
    return this.drawn;
  }

  range() {
    const zoom = this.page.zoom[this.axis];
    if (zoom) return zoom;
    let [first, last] = this.ends ?? [Infinity, -Infinity];
    this.lines.forEach(({ x, role }) => {
      if (!x.length || (this.ends && (role !== "discarded" || this.axis !== "time"))) return;
      first = Math.min(first, x[0]);
      last = Math.max(last, x[x.length - 1]);
    });
    if (!this.ends)
      this.marks.forEach((mark) => {
        first = Math.min(first, mark[1]);
        last = Math.max(last, mark[1]);
      });
    if (!(first <= last)) return [0, 1];
    return last > first ? [first, last] : [first, first + 1];
  }

  heights() {
    const [first, last] = this.range();
    const shown = this.lines.filter((line) => this.isShown(line));
    const x = this.drawn[0];
    const within = (line) =>
      this.drawn[this.lines.indexOf(line) + 1].filter((v, i) => v != null && x[i] >= first && x[i] <= last && (!this.log || v > 0));
    const own = shown.filter((line) => line.role === "main").flatMap(within);
    const every = shown.flatMap(within);
    const ends = this.exact || this.page.isFull ? outer(every) : robust(own.length ? own : every, every, this.log);
    const padded = pad(ends, this.log);
    return shown.some((line) => line.role === "part") ? [0, padded[1]] : padded; // a height is a sum
  }

  isShown(line) {
    return !this.plot || this.plot.series[this.lines.indexOf(line) + 1].show;
  }

  draw(width) {
    const { page, axis } = this;
    const series = this.series();
    const axes = {
      stroke: page.ink, font: page.font, grid: { stroke: page.grid, width: 1 },
      ticks: { stroke: page.grid, width: 1, size: 4 },
    };
    const lanes = this.lanes();
    this.newest();
    const before = this.plot; // it knows which curves are switched off
    this.plot = new uPlot(
      {
        width, height: this.tall(), ms: 1, series, bands: this.bands(),
        // Half of the last place's label stands beyond the axis.
        padding: [lanes.length * LANE + 6, Math.max(12, 3.3 * this.place(this.range()[1]).length), 0, 0],
        scales: {
          x: { time: false, range: () => this.range() },
          y: { distr: this.log ? 3 : 1, range: () => this.heights() },
        },
        axes: [
          { ...axes, size: 26, gap: 3, space: axis === "time" ? 80 : 50, values: (_, at) => at.map((v) => this.place(v)), incrs: { step: WHOLE, time: CLOCK }[axis] },
          { ...axes, size: axisWidth, gap: 3, ...(this.log ? { splits: logSplits, filter: (_, at) => at } : {}), values: (_, at) => at.map((v) => (v === null ? "" : short(v))) },
        ],
        cursor: {
          y: false, dataIdx: nearest,
          drag: { x: true, y: false, setScale: false },
          sync: { key: `${page.held}${axis}`, setSeries: false, filters: { pub: (type) => type === "mousemove" || type === "mouseleave" } },
          bind: { dblclick: () => () => (page.unzoom(), null) },
          points: { size: 6 },
        },
        select: { show: true },
        legend: { show: true, live: true },
        hooks: {
          setSelect: [(u) => this.select(u)],
          setCursor: [(u) => this.point(u)],
          setSeries: [(u, i, how) => how.show !== undefined && this.toggle(i, how.show)],
          draw: [(u) => this.annotate(u)],
        },
      },
      this.data(),
      this.figure,
    );
    before?.destroy();
    this.names();
    if (!this.plot.data[0].length) this.redraw(); // by itself it scales to points, and has none
  }

  // The area between the upper and the lower end of a band, which follow each other.
  bands() {
    const ends = this.lines.map((line, i) => (line.role === "band" ? i + 1 : 0)).filter((i) => i);
    return ends.filter((_, i) => i % 2 === 0).map((upper) => ({ series: [upper, upper + 1] }));
  }

  // All that was rolled back is one entry of the legend: of seven curves it would be seven more.
  names() {
    const rows = this.plot.root.querySelectorAll(".u-series");
    const seen = new Set();
    this.lines.forEach((line, i) => {
      const name = entry(line);
      if (seen.has(name)) rows[i + 1].style.display = "none";
      else if (name !== line.name) rows[i + 1].querySelector(".u-label").textContent = name;
      seen.add(name);
    });
  }

  toggle(index, isShown) {
    if (this.isToggling) return;
    this.isToggling = true;
    const name = entry(this.lines[index - 1]);
    this.lines.forEach((line, i) => {
      if (i + 1 !== index && entry(line) === name) this.plot.setSeries(i + 1, { show: isShown });
    });
    this.isToggling = false;
    this.redraw();
  }

  redraw() {
    const u = this.plot;
    if (!u) return;
    this.isOld = false;
    const [min, max] = this.range();
    this.newest();
    u.batch(() => {
      u.setData(this.data(), false);
      u.setScale("x", { min, max });
    });
    if (u.cursor.idx == null) u.setLegend({ idxs: u.series.map(() => null) }, false);
  }

  newest() {
    this.last = Math.max(...this.lines.filter((line) => line.x.length).map((line) => line.x[line.x.length - 1]));
  }

  drop() {
    this.plot?.destroy();
    this.plot = null;
  }

  width() {
    return Math.max(120, this.figure.clientWidth || 600);
  }

  tall() {
    return Math.min(this.height, innerWidth <= 640 ? 200 : Infinity);
  }

  resize() {
    const width = this.plot && this.width();
    if (width && Math.abs(width - this.plot.width) > 0.5) this.plot.setSize({ width, height: this.tall() });
  }

  // ------------------------------------------------------------------------------------ marks

  lanes() {
    const rows = this.marks.map((mark) => this.page.kinds[mark[0]].lane).filter((lane) => lane >= 0);
    return [...new Set(rows)].sort((a, b) => a - b);
  }

  annotate(u) {
    const { ctx } = u;
    const ratio = devicePixelRatio;
    const { left, top, width, height } = u.bbox;
    const lanes = this.lanes();
    const [first, last] = this.range();
    this.heads = []; // [x, end, words]: what can be pointed at, in pixels of the page
    ctx.save();
    ctx.font = `${10 * ratio}px sans-serif`;
    Object.assign(ctx, { textBaseline: "middle", textAlign: "left" });
    const shown = this.marks.filter((mark) => mark[1] >= first && mark[1] <= last);
    const groups = grouped(shown, (place) => u.valToPos(place, "x"));
    groups.forEach(({ kind, x: from, end, first: place, last: until, num, marks }, i) => {
      const look = this.page.kinds[kind];
      const below = look.lane < 0;
      const x = left + from * ratio;
      const y = below ? top + height - 6 * ratio : top - (9 + LANE * lanes.indexOf(look.lane)) * ratio;
      const radius = (look.size / 2) * ratio;
      if (marks.length <= NAMED) marks.forEach((mark) => this.heads.push([u.valToPos(mark[1], "x"), null, mark[2]]));
      else this.heads.push([from, end, `${whole(num)} times ${kind}, ${this.unit} ${this.place(place)} to ${this.place(until)}: zoom in for each`]);
      if (look.line || below) {
        ctx.globalAlpha = below || num > 1 ? 0.35 : 0.75;
        ctx.strokeStyle = look.colour;
        ctx.lineWidth = look.width * ratio;
        ctx.setLineDash(look.line === "dotted" ? [ratio, 3 * ratio] : look.line === "dashed" ? [5 * ratio, 4 * ratio] : []);
        ctx.beginPath();
        ctx.moveTo(x, top);
        ctx.lineTo(x, top + height);
        ctx.stroke();
      }
      shape(ctx, look.symbol, x, y, radius, look.colour);
      if (num === 1) return;
      ctx.globalAlpha = 1;
      ctx.fillStyle = look.colour;
      ctx.fillRect(x, y + radius + ratio, (end - from) * ratio, ratio);
      const text = num < 1000 ? String(num) : `${Math.floor(num / 1000)}k`;
      const room = from + look.size / 2 + 2 + ctx.measureText(text).width / ratio;
      // Marks of another kind in this row come first: its number is in the legend, and at the cursor.
      const isCovered = groups.some((other, j) => j !== i && this.page.kinds[other.kind].lane === look.lane && other.x >= from && other.x - 5 < room);
      ctx.fillStyle = this.page.ink;
      if (!isCovered) ctx.fillText(text, x + radius + 2 * ratio, y);
    });
    this.outside(u);
    ctx.restore();
  }

  // Values beyond the y axis: a triangle at the edge, in the colour of the line.
  outside(u) {
    const { left, top, width, height } = u.bbox;
    const ratio = devicePixelRatio;
    const { min, max } = u.scales.y;
    const [first, last] = this.range();
    this.numOutside = 0;
    this.lines.forEach((line, j) => {
      if (!["main", "discarded"].includes(line.role) || !this.isShown(line)) return;
      const colour = this.colour(line);
      const drawn = { up: -Infinity, down: -Infinity };
      line.y.forEach((value, i) => {
        if (value === null || line.x[i] < first || line.x[i] > last || (value >= min && value <= max)) return;
        this.numOutside++;
        const side = value > max ? "up" : "down";
        const x = u.valToPos(line.x[i], "x", true);
        if (x - drawn[side] < NEAR * ratio) return;
        drawn[side] = x;
        const y = side === "up" ? top + 5 * ratio : top + height - 5 * ratio;
        this.heads.push([(x - left) / ratio, null, `${line.name}: ${short(value)} at ${this.unit} ${this.place(line.x[i])}, beyond this axis`]);
        shape(u.ctx, side === "up" ? "triangle" : "down", x, y, 4 * ratio, colour);
      });
    });
    this.describe();
  }

  // -------------------------------------------------------------------------- pointing, choosing

  select(u) {
    const { left, width } = u.select;
    if (width > 4) this.page.zoomTo(this.axis, u.posToVal(left, "x"), u.posToVal(left + width, "x"));
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
  }

  point(u) {
    const { left } = u.cursor;
    const isHere = left >= 0 && this.figure.matches(":hover,:focus"); // the others only show where it is
    const near = !isHere ? [] : (this.heads ?? []).filter(([x, end]) => left >= x - NEAR && left <= (end ?? x) + NEAR);
    this.events.style.display = near.length ? "block" : "none";
    if (!near.length) return;
    this.events.replaceChildren(
      ...near.slice(0, 6).map((head) => {
        const line = element("div");
        line.textContent = head[2];
        return line;
      }),
    );
    const x = left + u.over.offsetLeft;
    const isLeft = x > this.figure.clientWidth / 2;
    this.events.style.top = `${u.over.offsetTop + 34}px`;
    this.events.style.left = isLeft ? "auto" : `${x + 14}px`;
    this.events.style.right = isLeft ? `${this.figure.clientWidth - x + 14}px` : "auto";
  }

  key(event) {
    const u = this.plot;
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const [first, last] = this.range();
    const x = u.data[0];
    const from = this.at ?? x.length - 1;
    let at = from;
    if (by) at = from + by * (event.shiftKey ? 10 : 1);
    else if (event.key === "Home") at = x.findIndex((v) => v >= first);
    else if (event.key === "End") at = x.findLastIndex((v) => v <= last);
    else if (event.key === "+" || event.key === "-") {
      const middle = x[Math.max(0, Math.min(x.length - 1, from))] ?? (first + last) / 2;
      const half = ((last - first) / 2) * (event.key === "+" ? 0.5 : 2);
      this.page.zoomTo(this.axis, middle - half, middle + half);
    } else if (event.key === "Escape" || event.key === "0") this.page.unzoom();
    else return;
    event.preventDefault();
    this.at = Math.max(0, Math.min(x.length - 1, at));
    if (!x.length || (!by && event.key !== "Home" && event.key !== "End")) return;
    u.setCursor({ left: u.valToPos(x[this.at], "x"), top: 10 }, true, true);
    this.page.spoken.textContent = this.spoken(x[this.at]);
  }

  // ------------------------------------------------------------------------------------- words

  spoken(place) {
    const values = this.lines
      .filter((line) => line.role !== "discarded")
      .map((line) => [line, line.x.indexOf(place)])
      .filter(([, i]) => i >= 0)
      .map(([line, i]) => `${line.name} ${line.y[i] === null ? "no value" : short(line.y[i])}`);
    const events = this.marks.filter((mark) => mark[1] === place).map((mark) => mark[2]);
    return [`${this.unit} ${this.place(place)}`, ...values, ...events].join("; ");
  }

  describe() {
    const main = this.lines.filter((line) => line.role === "main" || line.role === "part");
    const drawn = main.reduce((sum, line) => sum + line.x.length, 0);
    const total = main.reduce((sum, line) => sum + line.total, 0);
    const bad = main.reduce((sum, line) => sum + line.bad, 0);
    const parts = [`${whole(drawn)} of ${whole(Math.max(drawn, total))} point${total === 1 ? "" : "s"}`];
    if (bad) parts.push(`${whole(bad)} not finite`);
    if (this.numOutside) parts.push(`${whole(this.numOutside)} beyond the axis`);
    if (this.lines.some((line) => line.role === "mean")) parts.push("smoothed; decisions read the raw values");
    if (this.note) parts.push(this.note);
    const text = parts.join("; ");
    if (this.counts.textContent !== text) {
      this.counts.textContent = text;
      this.counts.title = text;
    }
    const kinds = {};
    this.marks.forEach((mark) => (kinds[mark[0]] = (kinds[mark[0]] ?? 0) + mark[4]));
    const finite = main.flatMap((line) => line.y.filter((v) => v !== null));
    const [low, high] = outer(finite);
    const newest = main.map((line) => {
      const last = line.y.findLastIndex((v) => v !== null);
      return last < 0 ? `${line.name} without a finite value` : `${line.name} ${short(line.y[last])} at ${this.unit} ${this.place(line.x[last])}`;
    });
    const range = finite.length ? `Lowest ${short(low)}, highest ${short(high)}. ` : "";
    const events = Object.entries(kinds).map(([kind, num]) => `${whole(num)} ${kind}`);
    const label = `${this.title} over ${this.unit}. Newest: ${newest.join(", ")}. ${range}${text}. ${events.length ? `Marked: ${events.join(", ")}.` : ""}`;
    if (this.figure.getAttribute("aria-label") !== label) this.figure.setAttribute("aria-label", label);
  }

  // The value of a series where the cursor is; where it is nowhere, the last one, finite or not.
  value(series, index) {
    const line = this.lines[series - 1];
    if (!line || line.role === "band" || entry(line) !== line.name) return ""; // of several curves none stands for all
    const value = index == null ? line.y.at(-1) : this.measured[series][index];
    return value == null ? "-" : short(value);
  }

  // ------------------------------------------------------------------------------------ files

  shownLines() {
    return this.lines.filter((line) => this.isShown(line));
  }

  // The points within the range, as they are drawn; times in UTC.
  table() {
    const [first, last] = this.range();
    const which = [...this.measured[0].keys()].filter((i) => this.measured[0][i] >= first && this.measured[0][i] <= last);
    const take = (column) => which.map((i) => column[i]);
    const xs = take(this.measured[0]).map((x) => (this.axis === "time" ? new Date(x).toISOString() : x));
    const lines = this.shownLines();
    const columns = lines.map((line) => take(this.measured[this.lines.indexOf(line) + 1]));
    const text = csv([this.unit, ...lines.map((line) => line.name)], [xs, ...columns]);
    save(new Blob([text], { type: "text/csv" }), `${this.fileName()}.csv`);
  }

  // The canvas below its title, above the names of its curves and marks.
  image() {
    const { page, plot } = this;
    const ratio = devicePixelRatio;
    const canvas = element("canvas");
    const { width, height } = plot.ctx.canvas;
    Object.assign(canvas, { width, height: height + 54 * ratio });
    const ctx = canvas.getContext("2d");
    ctx.fillStyle = page.ground;
    ctx.fillRect(0, 0, width, canvas.height);
    ctx.drawImage(plot.ctx.canvas, 0, 26 * ratio);
    ctx.textBaseline = "middle";
    ctx.fillStyle = page.ink;
    ctx.font = `600 ${13 * ratio}px sans-serif`;
    ctx.fillText(`${this.title} over ${this.unit}`, 8 * ratio, 14 * ratio);
    ctx.font = `${11 * ratio}px sans-serif`;
    let x = 8 * ratio;
    const y = canvas.height - 14 * ratio;
    const put = (name, symbol, colour, radius) => {
      shape(ctx, symbol, x + 5 * ratio, y, radius * ratio, colour);
      ctx.fillStyle = page.ink;
      ctx.fillText(name, (x += 14 * ratio), y);
      x += ctx.measureText(name).width + 14 * ratio;
    };
    const lines = new Map(this.shownLines().map((line) => [entry(line), this.colour(line)]));
    lines.forEach((colour, name) => put(name, "rect", colour, 4));
    const kinds = new Set(this.marks.map((mark) => mark[0]));
    kinds.forEach((kind) => put(kind, page.kinds[kind].symbol, page.kinds[kind].colour, 5));
    canvas.toBlob((blob) => save(blob, `${this.fileName()}.png`), "image/png");
  }

  fileName() {
    return this.title.toLowerCase().replace(/[^a-z0-9]+/g, "_").replace(/^_|_$/g, "") || "chart";
  }

  place(value) {
    if (value == null || !Number.isFinite(value)) return "-";
    if (this.axis === "time") return clock(value, this.range());
    return this.axis === "step" ? whole(Math.round(value)) : short(value);
  }
}

// ---------------------------------------------------------------------------------------- parts

// Milliseconds between labels of wall time: multiples are round in UTC, whatever the browser's zone.
const CLOCK = Object.entries({ 1e3: [1, 2, 5, 10, 15, 30], 6e4: [1, 2, 5, 10, 15, 30], 36e5: [1, 2, 3, 6, 12], 864e5: [1, 2, 5, 10, 30, 100, 300, 1000] })
  .flatMap(([size, each]) => each.map((n) => n * Number(size)));
const WHOLE = [1, 2, 5].flatMap((n) => [...Array(13).keys()].map((e) => n * 10 ** e)).sort((a, b) => a - b);

function outer(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return [low, high];
}

// The ends of the y axis by what most values are: beyond the middle 96 % of them by one and a half
// times its height at most. A tail that is no longer than that is shown whole.
function robust(own, every, isLog) {
  const [low, high] = outer(every);
  if (own.length < ROBUST.least) return [low, high];
  const to = isLog ? Math.log10 : (v) => v;
  const sorted = Float64Array.from(own, to).sort();
  const at = (part) => sorted[Math.round(part * (sorted.length - 1))];
  const [first, last] = [at(ROBUST.part), at(1 - ROBUST.part)];
  if (!(last > first)) return [low, high];
  const span = ROBUST.spans * (last - first);
  const back = isLog ? (v) => 10 ** v : (v) => v;
  const [least, most] = [back(first - span), back(last + span)];
  return outer(every.filter((v) => v >= least && v <= most));
}

function pad([low, high], isLog) {
  if (!(low <= high)) return isLog ? [0.1, 1] : [0, 1];
  if (isLog) {
    const room = Math.max(0.04 * Math.log10(high / low), 0.02);
    return [low / 10 ** room, high * 10 ** room];
  }
  const room = (high - low || Math.abs(high) || 1) * 0.05;
  return [low - room, high + room];
}

// Which point of a series the cursor means: series of other steps have none just there.
function nearest(u, series, index, place) {
  if (!series || index == null) return index;
  const [x, y] = [u.data[0], u.data[series]];
  if (y[index] !== undefined) return index;
  let [left, right] = [index, index];
  while (left >= 0 && y[left] === undefined) left--;
  while (right < x.length && y[right] === undefined) right++;
  if (left < 0 || right >= x.length) return null;
  return place - x[left] <= x[right] - place ? left : right;
}

// A value between two gaps, which a line would not show.
function lone(u, series, isShown) {
  if (isShown) return null;
  const y = u.data[series].map((v, i) => [v, i]).filter(([v]) => v !== undefined);
  return y
    .filter(([v], i) => v !== null && (y[i - 1]?.[0] ?? null) === null && (y[i + 1]?.[0] ?? null) === null)
    .map(([, i]) => i);
}

function entry(line) {
  return line.role === "discarded" ? "rolled back" : line.name;
}

// Where a logarithmic axis has its labels: of less than a decade evenly apart, as uPlot would name
// its very ends or one value alone; of up to three at 1, 2 and 5; else at some powers of ten.
export function logSplits(u, axis, min, max) {
  const decades = Math.log10(max / min);
  if (!(decades > 1)) {
    const rough = (max - min) / 4;
    const size = 10 ** Math.floor(Math.log10(rough));
    const by = [1, 2, 5, 10].map((n) => n * size).find((n) => n >= rough);
    const first = Math.ceil(min / by);
    return [...Array(Math.floor(max / by) - first + 1).keys()].map((i) => Number(((first + i) * by).toPrecision(12)));
  }
  const each = decades > 3 ? [1] : [1, 2, 5];
  const every = Math.max(1, Math.ceil(decades / 7));
  const first = Math.floor(Math.log10(min));
  const powers = [...Array(Math.ceil(decades) + 2).keys()].map((i) => first + i).filter((power) => power % every === 0);
  return powers.flatMap((power) => each.map((n) => Number(`${n}e${power}`))).filter((v) => v >= min && v <= max);
}

function axisWidth(u, values) {
  const longest = (values ?? []).reduce((most, text) => Math.max(most, text.length), 3);
  return 14 + 6.2 * longest;
}

function short(value) {
  const size = Math.abs(value);
  if (size && (size < 1e-3 || size >= 1e7)) return Number(value.toPrecision(4)).toExponential().replace("e+", "e");
  return FIVE_DIGITS.format(Number(value.toPrecision(5)));
}

// In UTC, as all sentences are; of more than a day with the date, of more than an hour to the minute.
export function clock(value, [first, last]) {
  const text = new Date(1000 * Math.round(value / 1000)).toISOString(); // cut, 7:59:59.999 reads as 7:59:59
  const hours = (last - first) / 3.6e6;
  return hours > 24 ? text.slice(5, 16).replace("T", " ") : text.slice(11, hours > 1 ? 16 : 19);
}

function whole(value) {
  return NUMBER.format(value);
}

function shape(ctx, name, x, y, radius, colour) {
  const path = new Path2D();
  SHAPES[name](path, radius);
  ctx.save();
  ctx.globalAlpha = 1;
  ctx.setLineDash([]);
  ctx.translate(x, y);
  ctx.fillStyle = colour;
  ctx.fill(path);
  ctx.restore();
}

function poly(path, at) {
  for (let i = 0; i < at.length; i += 2) path[i ? "lineTo" : "moveTo"](at[i], at[i + 1]);
  path.closePath();
}

function element(tag, className = "") {
  const made = document.createElement(tag);
  made.className = className;
  return made;
}

function glyph({ symbol, colour }) {
  const canvas = element("canvas");
  canvas.width = canvas.height = 24;
  shape(canvas.getContext("2d"), symbol, 12, 12, 10, colour);
  return canvas;
}

function save(blob, name) {
  const link = element("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

function button(text, press) {
  const made = element("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", press);
  return made;
}
