"""Learning rate and batch size: scaling rules, the gradient noise scale, and goodput."""

from retrain.controllers.scaling.goodput import Goodput as Goodput
from retrain.controllers.scaling.goodput import StepTimes as StepTimes
