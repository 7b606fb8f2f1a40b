use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use mamba2_cuda::{Compiled, Cubin, KernelIdentity, KernelKey, ShippedCubins};
use mamba2_spec::Arch;
use mamba2_tunedb::{Bundle, cubin_arch};

/// The cubins of imported bundles. Their keys are read at the first miss of the cubin cache.
pub(crate) struct BundleCubins {
    bundles: Vec<Arc<Bundle>>,
    arch: Arch,
    /// Digest of the identity, to the bundle and the key's text there. Of several NVRTC versions the newest.
    index: OnceLock<HashMap<String, (usize, KernelKey)>>,
}

impl BundleCubins {
    pub fn new(bundles: Vec<Arc<Bundle>>, arch: Arch) -> BundleCubins {
        BundleCubins {
            bundles,
            arch,
            index: OnceLock::new(),
        }
    }

    fn index(&self) -> &HashMap<String, (usize, KernelKey)> {
        self.index.get_or_init(|| {
            let mut index: HashMap<String, (usize, KernelKey)> = HashMap::new();
            for (i, bundle) in self.bundles.iter().enumerate() {
                let keys = bundle.cubin_keys().unwrap_or_else(|error| {
                    tracing::warn!(%error, "bundle without readable kernel keys");
                    Vec::new()
                });
                for key in keys
                    .iter()
                    .filter_map(|text| KernelKey::from_text(text).ok())
                {
                    let digest = key.identity.digest();
                    if index
                        .get(&digest)
                        .is_none_or(|(j, k)| *j == i && k.nvrtc < key.nvrtc)
                    {
                        index.insert(digest, (i, key));
                    }
                }
            }
            index
        })
    }
}

impl ShippedCubins for BundleCubins {
    fn find(&self, identity: &KernelIdentity) -> Option<Cubin> {
        let (bundle, key) = self
            .index()
            .get(&identity.digest())
            .filter(|(_, key)| key.identity == *identity)?;
        match self.bundles[*bundle].cubin(&key.to_text(), self.arch) {
            Ok(Some(cubin)) => {
                let target = cubin_arch(&cubin).unwrap_or(self.arch);
                Some(Cubin {
                    key: key.clone(),
                    compiled: Compiled {
                        cubin,
                        log: String::new(),
                        resources: None,
                        target,
                    },
                })
            }
            Ok(None) => None,
            Err(error) => {
                tracing::warn!(%error, "bundled kernel passed over");
                None
            }
        }
    }
}
