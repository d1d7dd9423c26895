/* Draws the charts of a report from the JSON in #data.

   data.runs[i] = {name, clock: {step, tokens, hours}, train: {metric: {step, value}},
                   evals: {source: {metric: {step, value}}},
                   tasks: {task: {metric: {step, value}}}, resumes: [step]}
   A value that JSON cannot hold (nan, inf) is null and leaves a gap. */
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const state = { x: "step", smoothing: 0, log: false, hidden: new Set() };
const DASHES = ["solid", "dash", "dot", "dashdot", "longdash"];
const SYMBOLS = ["circle", "diamond", "square", "cross", "x"];
const X_TITLES = { step: "step", tokens: "tokens seen", hours: "hours running" };
const TITLES = {
  learning_rate: ["Learning rate", ""],
  grad_norm: ["Gradient norm", "before clipping"],
  tokens_per_s: ["Speed", "tokens per second"],
  step_time_s: ["Step time", "seconds; median, and thin the 95th percentile"],
  input_wait_share: ["Waiting for input", "share of the step time"],
  mfu: ["MFU", "share of the devices' peak FLOP/s"],
  peak_memory_bytes: ["Peak memory", "GiB"],
};
const several = data.runs.length > 1;
const charts = [];

function cssColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function color(index) {
  return cssColor("--c" + (index % 8));
}

/* Straight line between the two nearest points of the clock. */
function toAxis(run, step) {
  if (state.x === "step") return step;
  const at = run.clock.step, to = run.clock[state.x];
  let low = 0, high = at.length - 1;
  if (high < 0 || step < at[0] || step > at[high]) return step === at[0] ? to[0] : null;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (at[middle] <= step) low = middle; else high = middle;
  }
  if (at[high] === at[low]) return to[low];
  return to[low] + (to[high] - to[low]) * (step - at[low]) / (at[high] - at[low]);
}

/* Exponential mean, corrected for its start; gaps stay gaps. */
function smooth(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

function line(run, curve, name, hue, more) {
  return Object.assign({
    type: "scatter", mode: curve.step.length > 1 ? "lines" : "markers", name: name,
    x: curve.step.map((step) => toAxis(run, step)), y: curve.value,
    line: { color: hue, width: 2 }, marker: { color: hue, size: 7 },
  }, more || {});
}

function shown() {
  return data.runs.map((run, index) => [run, index]).filter(([, i]) => !state.hidden.has(i));
}

function trainingLoss() {
  const traces = [];
  for (const [run, index] of shown()) {
    const curve = run.train.loss;
    if (!curve) continue;
    const hue = color(index), mean = smooth(curve.value, state.smoothing);
    traces.push(line(run, curve, run.name, hue,
      { opacity: 0.28, line: { color: hue, width: 1 }, hoverinfo: "skip" }));
    traces.push(line(run, { step: curve.step, value: mean }, run.name, hue, {
      customdata: curve.value,
      hovertemplate: "%{y:.4f} (raw %{customdata:.4f})<extra>%{fullData.name}</extra>",
    }));
    const resumed = run.resumes.map((step) => {
      const after = curve.step.findIndex((each) => each >= step);
      return after < 0 ? null : mean[after];
    });
    traces.push(line(run, { step: run.resumes, value: resumed }, run.name + " resumed", hue, {
      mode: "markers", marker: { color: hue, size: 11, symbol: "triangle-down" },
      hovertemplate: "resumed<extra>%{fullData.name}</extra>",
    }));
  }
  return traces;
}

function heldOutStyle(which, hue) {
  return {
    mode: "lines+markers",
    line: { color: hue, width: 2, dash: several ? DASHES[which % DASHES.length] : "solid" },
    marker: { color: hue, size: 7, symbol: SYMBOLS[which % SYMBOLS.length] },
  };
}

/* Curves of one metric in `group`: held-out data by source, or benchmarks by task. */
function ofGroup(group, metric) {
  const traces = [];
  const sources = [...new Set(data.runs.flatMap((run) => Object.keys(run[group])))];
  // Runs have the colors of the bar above; only what a dash means is left to explain.
  for (const [which, source] of several ? sources.entries() : []) {
    const hue = cssColor("--soft");
    traces.push(line(data.runs[0], { step: [], value: [] }, source, hue, {
      ...heldOutStyle(which, hue), x: [null], y: [null], showlegend: true, hoverinfo: "skip",
    }));
  }
  for (const [run, index] of shown()) {
    for (const [source, curves] of Object.entries(run[group])) {
      if (!curves[metric]) continue;
      const which = sources.indexOf(source), hue = color(several ? index : which);
      const name = several ? run.name + ", " + source : source;
      traces.push(line(run, curves[metric], name, hue, {
        ...heldOutStyle(which, hue), showlegend: !several,
        hovertemplate: "%{y:.4f}<extra>%{fullData.name}</extra>",
      }));
    }
  }
  return traces;
}

function metric(name, scale) {
  return () => shown().filter(([run]) => run.train[name]).map(([run, index]) => {
    const { step, value } = run.train[name];
    const scaled = scale ? value.map((v) => (v === null ? null : v / scale)) : value;
    return line(run, { step, value: scaled }, run.name, color(index),
      { line: { color: color(index), width: 1.5 } });
  });
}

function stepTime() {
  const slow = shown().filter(([run]) => run.train.step_time_p95_s).map(([run, index]) =>
    line(run, run.train.step_time_p95_s, run.name + " p95", color(index),
      { opacity: 0.5, line: { color: color(index), width: 1 } }));
  return [...metric("step_time_p50_s")(), ...slow];
}

function has(name) {
  return data.runs.some((run) => run.train[name]);
}

function addChart(title, unit, traces, options) {
  const card = document.createElement("div");
  card.className = "chart card" + (options.wide ? " wide" : "");
  const heading = document.createElement("h3"), small = document.createElement("small");
  heading.textContent = title + " ";
  small.textContent = unit;
  heading.append(small);
  const plot = document.createElement("div");
  plot.className = "plot";
  card.append(heading, plot);
  document.getElementById("charts").append(card);
  charts.push({ plot, traces, options });
}

function addCharts() {
  const sources = data.runs.flatMap((run) => Object.values(run.evals));
  const evals = (name) => sources.some((curves) => curves[name]);
  if (has("loss")) addChart("Training loss", "nats per token", trainingLoss, { wide: 1, loss: 1 });
  if (evals("loss")) {
    addChart("Held-out loss", "nats per token", () => ofGroup("evals", "loss"),
      { wide: !evals("bits_per_byte"), loss: 1, legend: 1 });
  }
  if (evals("bits_per_byte")) {
    addChart("Held-out bits per byte", "", () => ofGroup("evals", "bits_per_byte"), { loss: 1, legend: 1 });
  }
  const scores = data.runs.flatMap((run) => Object.values(run.tasks).flatMap(Object.keys));
  for (const name of [...new Set(scores)].sort()) {
    addChart("Benchmarks", name, () => ofGroup("tasks", name), { legend: 1 });
  }
  const special = ["loss", "tokens_seen", "step_time_p50_s", "step_time_p95_s"];
  const order = ["learning_rate", "grad_norm", "tokens_per_s", "step_time_s",
    "input_wait_share", "mfu", "peak_memory_bytes"];
  for (const name of order) {
    const [title, unit] = TITLES[name];
    if (name === "step_time_s") {
      if (has("step_time_p50_s")) addChart(title, unit, stepTime, { zero: 1 });
    } else if (has(name)) {
      addChart(title, unit, metric(name, name === "peak_memory_bytes" ? 2 ** 30 : 0), {
        zero: name !== "grad_norm", small: name === "learning_rate",
        percent: name === "input_wait_share" || name === "mfu",
      });
    }
  }
  const others = new Set(data.runs.flatMap((run) => Object.keys(run.train)));
  for (const name of [...others].sort()) {
    if (!special.includes(name) && !order.includes(name)) addChart(name, "", metric(name), {});
  }
}

function layout(options) {
  const grid = cssColor("--line"), ink = cssColor("--ink"), card = cssColor("--card");
  const axis = { gridcolor: grid, linecolor: grid, zerolinecolor: grid, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: cssColor("--soft"), size: 12, family: "system-ui, sans-serif" },
    margin: { l: 48, r: 14, t: 8, b: 36 }, hovermode: "x unified", uirevision: state.x,
    hoverlabel: { bgcolor: card, bordercolor: grid, font: { color: ink, size: 12 } },
    xaxis: { ...axis, title: { text: X_TITLES[state.x], standoff: 6 },
      tickformat: state.x === "hours" ? "~g" : "~s",
      hoverformat: state.x === "hours" ? ".3f" : ",.0f" },
    yaxis: { ...axis, type: options.loss && state.log ? "log" : "linear",
      rangemode: options.zero ? "tozero" : "normal",
      tickformat: options.percent ? "~%" : options.small ? ".2~e" : "",
      hoverformat: options.percent ? ".2%" : options.small ? ".3~e" : ".5~g",
      exponentformat: "SI" },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: grid, activecolor: ink },
    showlegend: Boolean(options.legend),
    legend: { orientation: "h", y: 1.02, yanchor: "bottom", x: 0, font: { size: 12 } },
  };
}

function draw() {
  // A list of what may be there: by default plotly adds a button that uploads the chart.
  const config = {
    responsive: true, displaylogo: false, plotlyServerURL: "",
    modeBarButtons: [["toImage", "pan2d", "resetScale2d"]],
  };
  for (const { plot, traces, options } of charts) {
    const drawn = traces().map((trace) => ({ showlegend: false, ...trace }));
    Plotly.react(plot, drawn, layout(options), config);
  }
}

/* Few points are hardly noisier than their mean is late. */
function defaultSmoothing() {
  const points = Math.max(...data.runs.map((run) => (run.train.loss || { step: [] }).step.length));
  return Math.round(50 * Math.min(Math.max(1 - 12 / points, 0), 0.9)) / 50;
}

function addControls() {
  state.smoothing = defaultSmoothing();
  document.getElementById("smoothing").value = state.smoothing;
  const on = (id, event, act) => document.getElementById(id).addEventListener(event, (e) => {
    act(e.target);
    draw();
  });
  on("x", "change", (input) => { state.x = input.value; });
  on("smoothing", "input", (input) => { state.smoothing = Number(input.value); });
  on("log", "change", (input) => { state.log = input.checked; });
  for (const option of document.querySelectorAll("#x option")) {
    option.hidden = !data.runs.every((run) => run.clock[option.value].length);
  }
  document.getElementById("runs").hidden = !several;
  if (several) {
    data.runs.forEach((run, index) => {
      const button = document.createElement("button"), swatch = document.createElement("span");
      swatch.className = "swatch";
      swatch.style.background = "var(--c" + (index % 8) + ")";
      button.setAttribute("aria-pressed", "true");
      button.append(swatch, run.name);
      button.addEventListener("click", () => {
        if (!state.hidden.delete(index)) state.hidden.add(index);
        button.setAttribute("aria-pressed", String(!state.hidden.has(index)));
        draw();
      });
      document.getElementById("runs").append(button);
    });
  }
  document.getElementById("bar").hidden = false;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
}

/* plotly.js is kept gzipped: 2 MB instead of 5 in every report. */
async function loadPlotly() {
  const packed = atob(document.getElementById("plotly").textContent);
  const bytes = Uint8Array.from(packed, (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

loadPlotly().then(() => {
  addCharts();
  addControls();
  draw();
}).catch((error) => {
  const failed = document.getElementById("failed");
  failed.textContent = "The curves could not be drawn (" + error + "); a browser of 2023 or " +
    "later is needed. The tables below are complete.";
  failed.hidden = false;
});
