-- every learning step: cost, expected acceptance at the gate, whether it was served, tokens gained over the baseline
SELECT
    run,
    "offset",
    target,
    part,
    loss_name,
    loss,
    positions,
    acceptance_before,
    acceptance_after,
    acceptance_after - acceptance_before AS expected_gain,
    acceptance_baseline,
    tokens_gained,
    served,
    reason,
    seconds,
    sum(seconds::DOUBLE) OVER so_far AS seconds_so_far,
    coalesce(sum(tokens_gained) OVER so_far, 0) AS tokens_gained_so_far,
    drafter_version,
    head_version
FROM updates
WINDOW so_far AS (PARTITION BY run ORDER BY seq)
ORDER BY run, seq;
