//! The default of a shape that nobody tuned, held against what tuning chose for those that ship.

use mamba2_spec::rules;
use mamba2_tunedb::Shipped;

/// For most shipped shapes the default has the tuned strategy and segments; elsewhere it was measured to lose little or much, which the record
/// says. If templates or rules move this far apart, `estimate.rs` wants fitting anew.
#[test]
fn defaults_split_the_work_as_tuning_did_for_most_shipped_shapes() {
    let device = mamba2_spec::DeviceFacts::assumed(mamba2_spec::Arch(90));
    let (mut alike, mut others) = (0, Vec::new());
    for record in Shipped::embedded().records() {
        let record = record.unwrap();
        let Some(problem) = record.key.problem() else {
            continue;
        };
        // One fixed chunk size is not the default's choice.
        let Ok(tuned) = record.strategy() else {
            continue;
        };
        let default = rules::default_strategy(&problem, &device).unwrap();
        if (default.name(), default.segment()) == (tuned.name(), tuned.segment()) {
            alike += 1;
        } else {
            let evidence = &record.evidence;
            others.push(format!(
                "{problem}: default {} {:?}, tuned {} {:?} {:.1} us",
                default.name(),
                default.segment(),
                tuned.name(),
                tuned.segment(),
                evidence.median_us
            ));
        }
    }
    println!("{alike} alike; the others:\n{}", others.join("\n"));
    assert!(alike > 0, "records of a GPU with 132 multiprocessors ship");
    assert!(alike >= 2 * others.len(), "{alike} alike, {}", others.len());
}
