"use strict";
// Shows one pair at a time. Prompts are only ever set as text.
(() => {
  const KEYS = { 1: "left", 2: "right", 0: "tie", s: "skip" };
  const get = (id) => document.getElementById(id);
  const voter = get("voter");
  let pair = null;
  let busy = false;
  let ended = false;

  async function ask(path, body) {
    const options = body && {
      method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
    };
    const response = await fetch(path, options);
    const found = await response.json();
    if (!response.ok) throw new Error(found.error);
    return found;
  }

  function load(image, name, alt) {
    image.alt = alt;
    image.src = `picture/${name}`;
  }

  function show(state) {
    pair = state.pair;
    if (voter.value !== state.voter) voter.value = state.voter;
    get("progress").max = state.total;
    get("progress").value = state.judged;
    get("count").textContent = `${state.judged} of ${state.total}`;
    get("ballot").hidden = pair === null;
    get("skip").disabled = pair === null;
    get("undo").disabled = state.judged === 0;
    if (pair === null) {
      get("said").textContent = "You have judged all pairs. Your choices are stored.";
      return;
    }
    get("said").textContent = "";
    get("prompt").textContent = state.prompt;
    load(get("left").firstElementChild, state.left, "the first picture");
    load(get("right").firstElementChild, state.right, "the second picture");
    get("sources").replaceChildren(...state.sources.map((name) => {
      const image = document.createElement("img");
      load(image, name, "the picture to edit");
      return image;
    }));
  }

  // One request at a time: a second click on a pair must not judge the next one.
  async function act(path, body) {
    if (busy || ended) return;
    busy = true;
    try {
      const found = await ask(path, body);
      if (found.finished) {
        ended = true;
        get("ballot").hidden = true;
        get("said").textContent = "Finished. Your choices are stored; the command goes on in the terminal.";
      } else show(found);
    } catch (error) {
      const gone = error instanceof TypeError; // No answer at all.
      get("said").textContent = gone ? "The command has ended. What you chose before is stored." : error.message;
    } finally {
      busy = false;
    }
  }

  const choose = (choice) => pair !== null && act("choice", { voter: voter.value.trim(), pair, choice });
  const undo = () => act("undo", { voter: voter.value.trim() });
  const reload = () => act(`state?voter=${encodeURIComponent(voter.value.trim())}`);

  for (const button of document.querySelectorAll("[data-choice]")) {
    button.addEventListener("click", () => choose(button.dataset.choice));
  }
  get("undo").addEventListener("click", undo);
  get("finish").addEventListener("click", () => act("finish", {}));
  voter.addEventListener("change", reload);
  addEventListener("keydown", (event) => {
    if (event.repeat || event.ctrlKey || event.metaKey || event.altKey || event.target === voter) return;
    if (event.key in KEYS) choose(KEYS[event.key]);
    else if (event.key === "u") undo();
  });
  act("state");
})();
