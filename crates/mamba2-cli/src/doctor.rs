//! `mamba2 doctor`: what this machine has, and what is missing.

use mamba2::{Availability, CUBIN_DIRECTORY, CacheDir, CubinCache, Ladder};
use mamba2_tunedb::{Environment, LocalDb};
use serde_json::{Value, json};

use crate::cli::DoctorArgs;
use crate::error::CliError;
use crate::print;

/// Runs the command. It reports and succeeds on every machine.
pub fn run(args: &DoctorArgs) -> Result<(), CliError> {
    let found = mamba2::availability();
    let cache = CacheDir::decide(&Environment::from_process());
    if args.json {
        print::json(&to_json(&found, &cache))
    } else {
        print::out(&to_text(&found, &cache))
    }
}

fn to_text(found: &Availability, cache: &CacheDir) -> String {
    let mut lines = vec![format!("mamba2        {}", env!("CARGO_PKG_VERSION"))];
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    lines.push(format!(
        "cpu           ok, {threads} threads; needs nothing else"
    ));
    match &found.driver {
        Ok(driver) => {
            lines.push(format!(
                "driver        ok, CUDA {}.{} from {}",
                driver.version.0, driver.version.1, driver.path
            ));
            if driver.devices.is_empty() {
                lines.push(
                    "gpu           MISSING: the driver shows no device; see CUDA_VISIBLE_DEVICES"
                        .into(),
                );
            }
            for device in &driver.devices {
                let facts = &device.facts;
                let usable = match facts.arch.require_supported() {
                    Ok(_) => "ok".to_string(),
                    Err(e) => format!("TOO OLD: {e}"),
                };
                lines.push(format!(
                    "gpu {:<9} {usable}, {}, {}, {} multiprocessors, {} KiB of shared memory a block, PCI {}",
                    device.ordinal,
                    facts.name,
                    facts.arch,
                    facts.sm_count,
                    facts.shared_memory_optin_bytes / 1024,
                    device.pci_bus_id
                ));
            }
        }
        Err(error) => lines.push(format!(
            "driver        MISSING: {}",
            indent(&error.to_string())
        )),
    }
    match &found.nvrtc {
        Ok(nvrtc) => {
            let archs: Vec<String> = nvrtc.archs.iter().map(|a| a.0.to_string()).collect();
            lines.push(format!(
                "nvrtc         ok, {} from {}, compiles for {}",
                nvrtc.version,
                nvrtc.path,
                archs.join(" ")
            ));
        }
        Err(error) => lines.push(format!(
            "nvrtc         MISSING: {}",
            indent(&error.to_string())
        )),
    }
    match &cache.path {
        Some(path) => {
            lines.push(format!(
                "cache         {} ({})",
                path.display(),
                cache.reason
            ));
            let cubins = CubinCache::new(path.join(CUBIN_DIRECTORY)).export().len();
            lines.push(format!(
                "kernels       {cubins} compiled, in {CUBIN_DIRECTORY}"
            ));
        }
        None => lines.push(format!(
            "cache         none: {}; kernels are compiled anew by each process",
            cache.reason
        )),
    }
    if let Some(kind) = &cache.network_file_system {
        lines.push(format!("cache         on {kind}: the tuning store needs a local disk, set MAMBA2_CACHE_DIR to tune here"));
    }
    lines.push(format!("records       {}", describe_records(cache)));
    for warning in Ladder::builder().cache(cache).build().warnings() {
        lines.push(format!("warning       {warning}"));
    }
    lines.join("\n")
}

fn describe_records(cache: &CacheDir) -> String {
    match LocalDb::in_cache(cache).and_then(|db| db.snapshot()) {
        Ok(Some(snapshot)) => format!("{} local, snapshot {}", snapshot.len(), snapshot.digest()),
        Ok(None) => "none tuned on this machine; shipped records and defaults are used".into(),
        Err(error) => format!("unreadable, shipped records and defaults are used: {error}"),
    }
}

fn to_json(found: &Availability, cache: &CacheDir) -> Value {
    let driver = match &found.driver {
        Ok(driver) => json!({
            "path": driver.path,
            "cuda": format!("{}.{}", driver.version.0, driver.version.1),
            "devices": driver.devices.iter().map(|d| json!({
                "ordinal": d.ordinal, "facts": d.facts, "uuid": d.uuid, "pci": d.pci_bus_id,
                "supported": d.facts.arch.require_supported().is_ok(),
            })).collect::<Value>(),
        }),
        Err(error) => json!({ "error": error.to_string() }),
    };
    let nvrtc = match &found.nvrtc {
        Ok(nvrtc) => {
            json!({ "path": nvrtc.path, "version": nvrtc.version.to_string(), "archs": nvrtc.archs })
        }
        Err(error) => json!({ "error": error.to_string() }),
    };
    json!({
        "version": env!("CARGO_PKG_VERSION"),
        "driver": driver,
        "nvrtc": nvrtc,
        "cache": {
            "path": cache.path,
            "reason": cache.reason,
            "network_file_system": cache.network_file_system,
            "warnings": Ladder::builder().cache(cache).build().warnings(),
        },
        "records": describe_records(cache),
    })
}

fn indent(text: &str) -> String {
    text.replace('\n', "\n              ")
}
