-- every learning step: what it cost, what the gate saw, and whether it was served
SELECT
    run,
    "offset",
    part,
    loss_name,
    loss,
    positions,
    acceptance_before,
    acceptance_after,
    acceptance_after - acceptance_before AS expected_gain,
    served,
    reason,
    seconds,
    sum(seconds::DOUBLE) OVER (PARTITION BY run ORDER BY seq) AS seconds_so_far,
    drafter_version,
    head_version
FROM updates
ORDER BY run, seq;
