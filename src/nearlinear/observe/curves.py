"""Curves of a run: `draw` for a terminal, `svg` for a page; both place the same `Series` on the same axes.

Digits: one process and two       title
●─● one   ×─× two   ╌╌╌ ideal     legend: each curve has a mark of its own, so colour is not needed
loss                              name of the vertical axis
 2┤⢣                              ticks stand at round numbers
 1┤ ⠣⣀●⡀⢀⣀×⣀                      curves that lie on each other show their marks in turn;
 0┼──┬─────┬──                    a value that is not finite leaves a gap
     5     10
     step
"""

from nearlinear.observe.axes import Series
from nearlinear.observe.characters import draw
from nearlinear.observe.picture import svg

__all__ = ["Series", "draw", "svg"]
