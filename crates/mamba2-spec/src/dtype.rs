use serde::{Deserialize, Serialize};

use crate::SpecError;

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE float16.
    F16,
    /// IEEE float32.
    F32,
}

impl Dtype {
    /// Every dtype, in order of declaration.
    pub const ALL: [Dtype; 3] = [Dtype::Bf16, Dtype::F16, Dtype::F32];

    /// Bytes of one element.
    pub const fn size_bytes(self) -> usize {
        match self {
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::F32 => 4,
        }
    }

    /// `bf16`, `f16` or `f32`.
    pub const fn name(self) -> &'static str {
        match self {
            Dtype::Bf16 => "bf16",
            Dtype::F16 => "f16",
            Dtype::F32 => "f32",
        }
    }
}

impl std::fmt::Display for Dtype {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl std::str::FromStr for Dtype {
    type Err = SpecError;

    fn from_str(text: &str) -> Result<Self, SpecError> {
        Dtype::ALL
            .into_iter()
            .find(|d| d.name() == text)
            .ok_or_else(|| SpecError::Option {
                key: "dtype".into(),
                expected: "bf16, f16 or f32".into(),
                got: text.into(),
            })
    }
}
