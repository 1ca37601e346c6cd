/* Formulas and diagrams. Each program comes from the site's own folder, and only on pages that need it. */
(function () {
  "use strict";
  const folder = new URL(".", document.currentScript.src);

  function load(name, ready) {
    const script = document.createElement("script");
    script.src = new URL(name, folder).href;
    script.addEventListener("load", ready);
    document.head.append(script);
  }

  function showFormulas() {
    if (!document.querySelector(".arithmatex")) return;
    window.MathJax = {
      tex: { inlineMath: [["\\(", "\\)"]], displayMath: [["\\[", "\\]"]] },
      options: { ignoreHtmlClass: ".*|", processHtmlClass: "arithmatex", enableMenu: false },
    };
    load("mathjax/tex-svg.js", () => {});
  }

  function showDiagrams() {
    const diagrams = [...document.querySelectorAll("pre.diagram")].map((source) => {
      const box = document.createElement("div");
      box.className = "diagram";
      source.replaceWith(box);
      return { box, text: source.textContent };
    });
    if (!diagrams.length) return;
    const draw = async () => {
      const isDark = document.body.dataset.mdColorScheme === "slate";
      window.mermaid.initialize({ startOnLoad: false, securityLevel: "strict", theme: isDark ? "dark" : "neutral", flowchart: { rankSpacing: 28, nodeSpacing: 24, padding: 10 } });
      for (const [index, { box, text }] of diagrams.entries()) {
        const { svg } = await window.mermaid.render(`diagram-${index}`, text);
        box.innerHTML = svg;
      }
      document.documentElement.dataset.diagrams = "drawn";
    };
    load("mermaid/mermaid.tiny.js", () => {
      draw();
      new MutationObserver(draw).observe(document.body, { attributeFilter: ["data-md-color-scheme"] });
    });
  }

  document.addEventListener("DOMContentLoaded", () => { showFormulas(); showDiagrams(); });
})();
