// Arrays that are alive at the instruction under the pointer, the largest first.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const svg = document.getElementById("timeline");
  if (data === null || svg === null) return;
  const SHOWN = 10;
  const GIB = 2 ** 30, MIB = 2 ** 20;
  const cursor = document.getElementById("cursor");
  const box = document.getElementById("alive");
  const size = (n) => (n >= GIB ? (n / GIB).toFixed(2) + " GiB" : (n / MIB).toFixed(2) + " MiB");

  function show(at, x, right) {
    const alive = data.lives.filter((life) => life[3] <= at && at < life[4]);
    alive.sort((a, b) => b[2] - a[2]);
    const whole = alive.reduce((sum, life) => sum + life[2], data.state);
    const inside = data.loops.filter((loop) => loop[1] <= at && at < loop[2]).pop();
    const lines = [`instruction ${at} of ${data.length}: ${size(whole)}`];
    if (inside) lines.push(inside[0] === null ? "in a loop" : `in a loop, ${inside[0]} times`);
    lines.push(`${size(data.state)}  weights and optimizer`);
    for (const life of alive.slice(0, SHOWN)) lines.push(`${size(life[2])}  ${life[0]}`);
    if (alive.length > SHOWN) lines.push(`and ${alive.length - SHOWN} smaller`);
    box.textContent = lines.join("\n");
    box.style.left = right ? "14px" : "auto";
    box.style.right = right ? "auto" : "14px";
    box.hidden = false;
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.removeAttribute("hidden");
  }

  svg.addEventListener("mousemove", (event) => {
    const rect = svg.getBoundingClientRect();
    const share = Math.min(0.999999, Math.max(0, (event.clientX - rect.left) / rect.width));
    show(Math.floor(share * data.length), share * svg.viewBox.baseVal.width, share > 0.5);
  });
  svg.addEventListener("mouseleave", () => {
    box.hidden = true;
    cursor.setAttribute("hidden", "");
  });
})();
