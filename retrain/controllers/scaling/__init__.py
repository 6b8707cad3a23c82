"""Learning rate and batch size: scaling rules, the gradient noise scale, and goodput."""

from retrain.controllers.scaling.goodput import BatchSuggestion as BatchSuggestion
from retrain.controllers.scaling.goodput import Goodput as Goodput
from retrain.controllers.scaling.goodput import StepTimes as StepTimes
from retrain.controllers.scaling.goodput import efficiency as efficiency
from retrain.controllers.scaling.goodput import phi_from as phi_from
from retrain.controllers.scaling.noise_scale import GradientNoiseScale as GradientNoiseScale
from retrain.controllers.scaling.rules import RULES as RULES
from retrain.controllers.scaling.rules import AdamScaleRule as AdamScaleRule
from retrain.controllers.scaling.rules import AdaScaleRule as AdaScaleRule
from retrain.controllers.scaling.rules import LearningRateScaling as LearningRateScaling
from retrain.controllers.scaling.rules import LEGWRule as LEGWRule
from retrain.controllers.scaling.rules import LinearRule as LinearRule
from retrain.controllers.scaling.rules import ScalingDecision as ScalingDecision
from retrain.controllers.scaling.rules import ScalingRule as ScalingRule
from retrain.controllers.scaling.rules import SqrtRule as SqrtRule
from retrain.controllers.scaling.rules import schedule_factor as schedule_factor
