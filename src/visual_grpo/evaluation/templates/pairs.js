"use strict";
// Enlarges pictures and pages through the embedded pairs. Text from prompts is only ever set as text, never as HTML.
(() => {
  const SIZE = 24;
  const pairs = JSON.parse(document.getElementById("data").textContent);
  const get = (id) => document.getElementById(id);
  const place = get("page-of-pairs");
  let page = 0;

  function make(tag, parent, text, className) {
    const element = document.createElement(tag);
    if (text !== undefined) element.textContent = text;
    if (className) element.className = className;
    parent.append(element);
    return element;
  }

  function side(parent, source, caption, answer) {
    const box = make("div", parent);
    const image = make("img", box);
    image.src = source;
    image.alt = caption;
    make("small", box, caption);
    if (answer) make("p", box, answer, "answer").dir = "auto";
  }

  function fixed(value) {
    const text = value.toFixed(2);
    return Number(text) === 0 ? "0.00" : text; // Never -0.00.
  }

  function worth(value) {
    return value === null ? "could not be scored" : fixed(value);
  }

  function card(pair) {
    const figure = make("figure", place, undefined, "pair");
    make("figcaption", figure, pair.prompt).dir = "auto";
    if (pair.given.length) {
      const row = make("div", figure, undefined, "sides");
      for (const [caption, picture] of pair.given) side(row, picture, caption);
    }
    const row = make("div", figure, undefined, "sides");
    side(row, pair.baseline, `base ${worth(pair.before)}`, pair.answers[0]);
    side(row, pair.trained, `trained ${worth(pair.after)}`, pair.answers[1]);
    const meta = make("small", figure, undefined, "meta");
    if (pair.change !== null) {
      // As it is shown: +0.00 is neither.
      const sign = pair.change >= 0.005 ? "up" : pair.change <= -0.005 ? "down" : "";
      make("span", meta, `${pair.change > 0 ? "+" : ""}${fixed(pair.change)}`, sign);
      meta.append(" ");
    }
    meta.append(`${pair.sampler}, sample ${pair.index + 1}`);
  }

  function options(select, key) {
    const values = [...new Set(pairs.map((pair) => pair[key]))];
    for (const value of values) make("option", select, value.replace("_", "-")).value = value;
    if (values.length > 1) make("option", select, "all").value = "";
  }

  function chosen() {
    const wanted = { sampler: get("sampler").value, split: get("split").value };
    const rows = pairs.filter((pair) => Object.keys(wanted).every((key) => !wanted[key] || pair[key] === wanted[key]));
    const sign = { loss: 1, gain: -1 }[get("order").value];
    // What could not be scored comes first: it is what a mean hides.
    const rank = (pair) => (pair.change === null ? -Infinity : sign * pair.change);
    return sign ? rows.sort((a, b) => (rank(a) < rank(b) ? -1 : rank(a) > rank(b) ? 1 : 0)) : rows;
  }

  function show() {
    const rows = chosen();
    const pages = Math.max(1, Math.ceil(rows.length / SIZE));
    page = Math.min(Math.max(page, 0), pages - 1);
    place.replaceChildren();
    rows.slice(page * SIZE, (page + 1) * SIZE).forEach(card);
    get("page").textContent = `${page + 1} of ${pages}`;
    get("previous").disabled = page === 0;
    get("next").disabled = page === pages - 1;
  }

  options(get("sampler"), "sampler");
  options(get("split"), "split");
  for (const id of ["sampler", "split", "order"]) get(id).addEventListener("change", () => { page = 0; show(); });
  get("previous").addEventListener("click", () => { page -= 1; show(); });
  get("next").addEventListener("click", () => { page += 1; show(); });

  // The enlarged picture flips between the sides of its pair by a click or the arrow keys.
  const viewer = get("viewer");
  let sides = [];
  let at = 0;

  function enlarge() {
    viewer.replaceChildren(sides[at].cloneNode());
    make("p", viewer, sides[at].nextElementSibling.textContent);
    if (!viewer.open) viewer.showModal();
  }

  function flip() {
    at = (at + 1) % sides.length;
    enlarge();
  }

  document.addEventListener("click", (event) => {
    const image = event.target;
    if (image.matches(".sides img")) {
      sides = [...image.closest(".sides").querySelectorAll("img")];
      at = sides.indexOf(image);
      enlarge();
    } else if (image === viewer.firstElementChild) flip();
    else if (viewer.open) viewer.close();
  });
  viewer.addEventListener("keydown", (event) => {
    if (["ArrowLeft", "ArrowRight", " "].includes(event.key)) { event.preventDefault(); flip(); }
  });
  show();
})();
