"""The project's parameters: their sections, the whole tree, and the check that explains what is wrong with them."""

from visual_grpo.config.base import Dtype, Strict, Task
from visual_grpo.config.data import DataChecks, DataConfig, StarterConfig
from visual_grpo.config.pipelines import GateRule, MonitorConfig, PromotionConfig, RetrainConfig
from visual_grpo.config.policy import (
    FlowConfig,
    LoraParams,
    ModelConfig,
    PolicyConfig,
    SamplerConfig,
    SamplingConfig,
    SignalCheckConfig,
)
from visual_grpo.config.rewards import RewardConfig
from visual_grpo.config.schema import ON_REQUEST, Parameters, flatten, merged
from visual_grpo.config.training import (
    AlarmConfig,
    ControlConfig,
    EvaluationConfig,
    GRPOConfig,
    ModuleConfig,
    TrackingConfig,
    TrainConfig,
)
