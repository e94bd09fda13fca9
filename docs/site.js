// Wide tables scroll in a box of their own, which the keyboard has to reach.
document$.subscribe(() => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) {
    box.tabIndex = 0;
  }
});
