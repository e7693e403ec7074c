// A button at every block of code that copies its text. It needs no network.
"use strict";
document.addEventListener("DOMContentLoaded", () => {
  for (const block of document.querySelectorAll("pre > code")) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "copy";
    button.textContent = "Copy";
    button.addEventListener("click", async () => {
      const text = block.textContent.replace(/\n$/, "");
      try {
        await navigator.clipboard.writeText(text);
      } catch {  // a page that was opened from a file has no clipboard
        const area = document.createElement("textarea");
        area.value = text;
        document.body.append(area);
        area.select();
        document.execCommand("copy");
        area.remove();
      }
      button.textContent = "Copied";
      setTimeout(() => { button.textContent = "Copy"; }, 1500);
    });
    block.parentElement.classList.add("copied");
    block.parentElement.append(button);
  }
});
