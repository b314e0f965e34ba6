"use strict";
// The token view. Texts of a model are hostile: they are only ever set as textContent.
(() => {
  const source = document.getElementById("tokens-data");
  if (!source) return;
  const data = JSON.parse(source.textContent);
  const at = (name) => document.getElementById("tokens-" + name);
  const make = (kind, text, parent) => {
    const element = document.createElement(kind);
    element.textContent = text;
    parent.append(element);
    return element;
  };
  const rgb = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name);
  const shade = (kind, value, low, high) => {
    if (value === null) return "";
    if (kind === "flags") return value ? `rgba(${rgb("flag")}, ${value > 1 ? 0.85 : 0.55})` : "";
    if (kind === "diverging") {
      const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
      return `rgba(${rgb(value < 0 ? "minus" : "plus")}, ${(0.75 * Math.abs(value) / most).toFixed(3)})`;
    }
    return `rgba(${rgb("plus")}, ${(high > low ? 0.05 + 0.7 * (value - low) / (high - low) : 0.25).toFixed(3)})`;
  };
  const words = (number) => number === null || number === undefined ? "-" : String(number);

  function scale(kind, what, low, high) {
    at("scale").replaceChildren();
    if (low === null) { make("span", "no token of this sample has it", at("scale")); return; }
    if (kind !== "flags") {
      const most = Math.max(Math.abs(low), Math.abs(high)) || 1;
      const [from, to] = kind === "diverging" ? [-most, most] : [low, high];
      make("span", words(from), at("scale"));
      const bar = make("i", "", at("scale"));
      const middle = kind === "diverging" ? "transparent," : "";
      bar.style.background = `linear-gradient(to right, ${shade(kind, from, low, high)}, ${middle} ${shade(kind, to, low, high)})`;
      make("span", words(to), at("scale"));
    }
    make("span", what, at("scale"));
  }

  function tell(sample, place, span) {
    for (const other of at("text").querySelectorAll(".at")) other.classList.remove("at");
    span.classList.add("at");
    at("one").replaceChildren();
    const wrote = sample.wrote[place] ? "written by the policy" : "given to the policy";
    make("b", `${JSON.stringify(sample.text[place])} `, at("one"));
    make("span", `token ${sample.before + place}, id ${sample.ids[place]}, ${wrote}`, at("one"));
    const row = make("div", "", at("one"));
    for (const [name, column] of Object.entries(sample.columns))
      if (column[place] !== null) make("span", `${name} ${words(column[place])}`, row);
  }

  function draw() {
    const sample = data.samples[at("sample").value];
    const name = at("column").value;
    const column = sample.columns[name] || sample.ids.map(() => null);
    const { kind, what } = data.columns[name];
    const there = column.filter((value) => value !== null);
    const low = there.length ? there.reduce((a, b) => Math.min(a, b)) : null;
    const high = there.length ? there.reduce((a, b) => Math.max(a, b)) : null;
    const facts = [`prompt ${sample.prompt}`, `reward ${words(sample.reward)}`, `engine ${words(sample.engine)}`,
      `attempt ${words(sample.attempt)}`];
    if (sample.before) facts.push(`the first ${sample.before} tokens are left out`);
    if (sample.after) facts.push(`the last ${sample.after} tokens are left out`);
    at("facts").textContent = facts.join(" · ");
    scale(kind, what, low, high);
    at("text").replaceChildren();
    at("one").textContent = "Point at a token, or tap it.";
    sample.text.forEach((text, place) => {
      const span = make("span", text, at("text"));
      if (!sample.wrote[place]) span.className = "prompt";
      span.style.backgroundColor = shade(kind, column[place], low, high);
      span.addEventListener("mouseenter", () => tell(sample, place, span));
      span.addEventListener("click", () => tell(sample, place, span));
    });
  }

  data.samples.forEach((sample, place) => {
    make("option", `${sample.run}, step ${sample.step}: ${sample.why} (${words(sample.reward)})`, at("sample")).value = place;
  });
  const there = Object.keys(data.columns).filter((name) => data.samples.some((sample) => name in sample.columns));
  for (const name of there) make("option", name, at("column")).value = name;
  at("sample").addEventListener("change", draw);
  at("column").addEventListener("change", draw);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  draw();
})();
