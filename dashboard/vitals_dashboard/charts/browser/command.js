// A command to copy. It is only ever set as text.

const STYLE = `
:host{display:block}
.command{display:flex;gap:.5rem;align-items:center;justify-content:space-between;border-radius:.4rem;
padding:.25rem .3rem .25rem .6rem;background:var(--st-code-background-color,#8882);
color:var(--st-text-color,inherit)}
code{font:.85rem/1.5 var(--st-code-font,monospace);white-space:pre-wrap;overflow-wrap:anywhere;
color:inherit;user-select:all}
button{font:.75rem/1.5 var(--st-font,sans-serif);color:inherit;background:transparent;cursor:pointer;
flex:none;border:1px solid var(--st-border-color,#8884);border-radius:.3rem;padding:.05rem .5rem}
button:focus-visible{outline:2px solid var(--st-primary-color,#0072B2);outline-offset:1px}
`;

export default function ({ data, parentElement }) {
  let box = parentElement.querySelector(".command");
  if (!box) {
    const style = document.createElement("style");
    style.textContent = STYLE;
    box = document.createElement("div");
    box.className = "command";
    const button = document.createElement("button");
    button.type = "button";
    box.append(document.createElement("code"), button);
    parentElement.append(style, box);
    button.addEventListener("click", () => copy(box));
  }
  const [code, button] = box.children;
  if (code.textContent === data) return;
  code.textContent = data;
  button.textContent = "Copy";
  button.setAttribute("aria-label", `Copy ${data}`);
}

// A page over plain HTTP of another machine has no clipboard: the command is marked, to be copied.
async function copy(box) {
  const [code, button] = box.children;
  try {
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "Copied";
  } catch {
    const range = document.createRange();
    range.selectNodeContents(code);
    const selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    button.textContent = "Press Ctrl+C";
  }
  setTimeout(() => (button.textContent = "Copy"), 2000);
}
