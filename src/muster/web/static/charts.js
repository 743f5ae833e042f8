// Draws the charts of a page with uPlot, from the REST API, over one shared range of time.
"use strict";

(() => {
  const form = document.getElementById("range");
  if (!form || !window.uPlot) return;
  const LINES = ["--line-1", "--line-2", "--line-3"];
  const SPANS = {m: 60, h: 3600, d: 86400};
  const PLOT_HEIGHT = 190, AT_ONCE = 4, STEPS = 300, DRAG_MIN = 4;
  const [last, from, to, live] = ["range-last", "range-from", "range-to", "range-live"].map((id) => document.getElementById(id));
  const ink = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const nowS = () => Date.now() / 1000;
  const spanS = (text) => parseInt(text, 10) * SPANS[text.slice(-1)];

  // The range: relative and live, or absolute. It is in the address, and kept for the next page.
  const query = new URLSearchParams(location.search);
  let range = {last: "15m"};
  try { range = JSON.parse(sessionStorage.getItem("muster-range")) || range; } catch { /* the default */ }
  if (query.get("from") && query.get("to")) range = {from: +query.get("from"), to: +query.get("to")};
  else if (query.get("last")) range = {last: query.get("last")};
  if (range.last && !spanS(range.last)) range = {last: "15m"};
  const bounds = () => range.last ? [nowS() - spanS(range.last), nowS()] : [range.from, range.to];

  const local = (s) => {  // as an input of local time has it
    const at = new Date(s * 1000 - new Date(s * 1000).getTimezoneOffset() * 60000);
    return at.toISOString().slice(0, 19);
  };
  let home = range.last || "15m";  // to which one returns after zooming
  const choose = (chosen) => {
    range = chosen;
    home = range.last || home;
    try { sessionStorage.setItem("muster-range", JSON.stringify(range)); } catch { /* not kept */ }
    const address = new URL(location.href);
    for (const name of ["last", "from", "to"]) address.searchParams.delete(name);
    for (const [name, value] of Object.entries(range)) address.searchParams.set(name, value);
    history.replaceState(null, "", address);
    show();
    refresh(true);
  };
  const show = () => {
    const [begin, end] = bounds();
    last.value = range.last || "";
    from.value = local(begin);
    to.value = local(end);
    live.setAttribute("aria-pressed", String(Boolean(range.last)));
  };
  form.hidden = false;
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    const [begin, end] = [from, to].map((field) => new Date(field.value).getTime() / 1000);
    if (!(begin < end)) return;
    form.querySelector("details").open = false;
    choose({from: begin, to: end});
  });
  last.addEventListener("change", () => choose({last: last.value}));
  live.addEventListener("click", () => {
    if (range.last) choose({from: Math.round(bounds()[0]), to: Math.round(bounds()[1])});
    else choose({last: home});
  });

  // Values and times
  // As tables and the command line show them: 6.3 GB, 10.9 %, 1.5 s.
  const scaled = (value, steps, show) => {
    const step = steps.find(([size]) => Math.abs(value) >= size) || steps[steps.length - 1];
    return show(value / step[0]) + step[1];
  };
  const digits = (value) => String(parseFloat(value.toPrecision(3)));
  const SIZES = [[1e12, " TB"], [1e9, " GB"], [1e6, " MB"], [1e3, " kB"]];
  const COUNTS = [[1e9, "G"], [1e6, "M"], [1e3, "k"]];
  const DURATIONS = [[86400, " d"], [3600, " h"], [60, " min"], [1, " s"], [1e-3, " ms"]];
  const figure = (value, unit) => {
    if (value == null) return "–";
    if (unit === " s") return value ? scaled(value, DURATIONS, digits) : "0 s";
    if (unit === " %") return parseFloat(value.toFixed(1)) + unit;
    const steps = unit.startsWith(" B") ? SIZES : COUNTS;
    if (Math.abs(value) < 1000) return digits(value) + unit;
    return scaled(value, steps, digits) + (steps === SIZES ? unit.slice(2) : unit);
  };
  const stamp = (s) => {
    const at = new Date(s * 1000);
    const day = range.last && spanS(range.last) <= 86400 ? "" : at.toLocaleDateString() + " ";
    return `${day}${at.toLocaleTimeString([], {hour12: false})} (${at.toISOString().slice(11, 19)} UTC)`;
  };

  const tick = (s, step) => {
    const at = new Date(s * 1000), two = {hour12: false, hour: "2-digit", minute: "2-digit"};
    if (step >= 86400) return at.toLocaleDateString([], {month: "short", day: "numeric"});
    return at.toLocaleTimeString([], step < 60 ? {...two, second: "2-digit"} : two);
  };

  // Drawn behind the lines: gaps, and times in which an alert fired. Before them: its threshold.
  const band = (u, begin, end, color) => {
    const [left, right] = [u.valToPos(begin, "x", true), u.valToPos(end, "x", true)];
    u.ctx.fillStyle = color;
    u.ctx.fillRect(left, u.bbox.top, Math.max(1, right - left), u.bbox.height);
  };
  const behind = (u, chart) => {
    u.ctx.save();
    u.ctx.beginPath();
    u.ctx.rect(u.bbox.left, u.bbox.top, u.bbox.width, u.bbox.height);
    u.ctx.clip();
    const [times, ...lines] = u.data;
    let known = null;
    times.forEach((at, place) => {
      if (lines.every((values) => values[place] == null)) return;
      if (known !== null && known < place - 1) band(u, times[known], at, ink("--calm-soft"));
      known = place;
    });
    for (const mark of chart.marks) {
      band(u, mark.from_ms / 1000, mark.to_ms ? mark.to_ms / 1000 : nowS(), ink(mark.severity === "critical" ? "--bad-soft" : "--warn-soft"));
    }
    u.ctx.restore();
  };
  const before = (u, chart) => {
    if (chart.threshold == null) return;
    const y = u.valToPos(chart.threshold, "y", true);
    u.ctx.save();
    u.ctx.strokeStyle = ink("--bad");
    u.ctx.setLineDash([6, 4]);
    u.ctx.beginPath();
    u.ctx.moveTo(u.bbox.left, y);
    u.ctx.lineTo(u.bbox.left + u.bbox.width, y);
    u.ctx.stroke();
    u.ctx.restore();
  };

  const plots = new Map();  // by figure: {u, chart, key, busy, at}

  const draw = (place, plot) => {
    const {chart} = plot;
    const data = [chart.at_ms.map((ms) => ms / 1000), ...chart.lines.map((line) => line.values)];
    const key = chart.lines.map((line) => line.name).join("\n") + chart.unit + ink("--card");
    if (plot.u && plot.key === key) {
      plot.u.setData(data);
    } else {
      if (plot.u) plot.u.destroy();
      place.querySelector(".hint")?.remove();
      plot.key = key;
      const axis = {stroke: ink("--soft"), grid: {stroke: ink("--edge"), width: 1}, ticks: {stroke: ink("--edge"), width: 1}};
      plot.u = new uPlot({
        width: Math.max(200, place.clientWidth), height: PLOT_HEIGHT,
        cursor: {sync: {key: "muster"}, drag: {x: true, y: false, setScale: false}},
        scales: {
          x: {time: true, range: () => bounds()},
          y: {range: (u, low, high) => {
            const most = Math.max(high ?? 0, plot.chart.threshold ?? 0);
            const top = most > 0 ? most * 1.1 : 1;
            return [Math.min(0, low ?? 0), chart.unit === " %" && most <= 100 ? Math.min(100, top) : top];
          }},
        },
        axes: [{...axis, values: (u, splits, n, space, step) => splits.map((s) => tick(s, step))}, {...axis, size: 72, values: (u, values) => values.map((value) => figure(value, chart.unit))}],
        series: [
          {label: "Time", value: (u, value) => value == null ? "" : stamp(value)},
          ...chart.lines.map((line, n) => ({
            label: line.name === place.dataset.metric ? place.dataset.label : line.name, stroke: ink(LINES[n % LINES.length]), width: 1.6, dash: n ? [6, 4] : undefined,
            fill: n ? undefined : ink(LINES[0]) + "1f",
            value: (u, value) => figure(value, chart.unit),
          })),
        ],
        hooks: {
          drawClear: [(u) => behind(u, plot.chart)],
          draw: [(u) => before(u, plot.chart)],
          setSelect: [(u) => {
            const {left, width} = u.select;
            if (width < DRAG_MIN) return;
            u.setSelect({left: 0, width: 0, top: 0, height: 0}, false);
            choose({from: Math.floor(u.posToVal(left, "x")), to: Math.ceil(u.posToVal(left + width, "x"))});
          }],
        },
      }, data, place);
    }
    place.querySelector(".none")?.remove();
    if (!chart.at_ms.length) place.append(Object.assign(document.createElement("p"), {className: "none", textContent: "No measurements in this time"}));
    setTimeout(() => newest(plot.u));  // after uPlot has updated its legend
    const words = chart.lines.map((line) => `${line.name === place.dataset.metric ? "" : line.name + " "}${figure(line.values.findLast((value) => value != null), chart.unit)}`);
    place.setAttribute("aria-label", `${place.dataset.title}. Now ${words.join("; ") || "no measurements"}`);
  };
  // Without a cursor, the legend has the newest values.
  const newest = (u) => {
    if (u.cursor.left >= 0 || !u.data[0].length) return;
    u.setLegend({idx: u.data[0].length - 1}, false);
  };

  const load = async (place, plot) => {
    const [begin, end] = bounds();
    const {kind, name, metric} = place.dataset;
    const asked = new URLSearchParams({name, metric, from_ms: Math.round(begin * 1000), to_ms: Math.round(end * 1000), points: STEPS});
    plot.busy = true;
    try {
      const answer = await fetch(`/api/v1/charts/${kind}?${asked}`, {credentials: "same-origin"});
      const told = await answer.json();
      if (!answer.ok) throw new Error(told.detail || answer.statusText);
      plot.chart = told;
      draw(place, plot);
    } catch (error) {
      if (!plot.u) {
        place.querySelector(".hint")?.remove();
        place.append(Object.assign(document.createElement("p"), {className: "hint", textContent: error.message}));
      }
    } finally {
      plot.busy = false;
      plot.at = nowS();
    }
  };

  const seen = (place) => {
    const box = place.getBoundingClientRect();
    return box.bottom > -200 && box.top < innerHeight + 200;
  };

  function refresh(all) {
    for (const [place, plot] of plots) {
      if (place.isConnected) continue;
      plot.u?.destroy();
      plots.delete(place);
    }
    let begun = 0;
    for (const place of document.querySelectorAll("figure.plot")) {
      if (!plots.has(place)) {
        plots.set(place, {at: 0});
        place.addEventListener("dblclick", () => choose({last: home}));
        place.addEventListener("mouseleave", () => setTimeout(() => plots.forEach(({u}) => u && newest(u))));
        place.addEventListener("keydown", (event) => step(event, place));
      }
      const plot = plots.get(place);
      const [begin, end] = bounds();
      const due = all ? 0 : range.last ? plot.at + Math.max(2, (end - begin) / STEPS) : Infinity;
      if ((nowS() >= due || !plot.at) && !plot.busy && seen(place) && begun++ < (all ? Infinity : AT_ONCE)) load(place, plot);
    }
  }

  // By keyboard: the arrows move the cursor, Escape returns to the live range.
  const step = (event, place) => {
    const {u} = plots.get(place) || {};
    const by = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (event.key === "Escape") choose({last: home});
    if (!u || !by || !u.data[0].length) return;
    event.preventDefault();
    const count = u.data[0].length;
    const next = Math.min(count - 1, Math.max(0, (u.cursor.idx ?? count - 1) + by));
    u.setCursor({left: u.valToPos(u.data[0][next], "x"), top: u.over.clientHeight / 2});
  };

  addEventListener("muster-tick", () => { if (range.last) show_later(); refresh(false); });
  addEventListener("muster-theme", () => refresh(true));
  addEventListener("scroll", () => refresh(false), {passive: true});
  let resized = 0;
  addEventListener("resize", () => {
    clearTimeout(resized);
    resized = setTimeout(() => plots.forEach(({u}, place) => u?.setSize({width: Math.max(200, place.clientWidth), height: PLOT_HEIGHT})), 150);
  });
  const show_later = () => { if (!form.contains(document.activeElement)) show(); };
  show();
  refresh(true);
})();
