-- rejected tokens that the target itself found likely: its own probability at temperature 1 of the token that was
-- proposed and of the one that was emitted instead, and the entropy of its distribution there
SELECT
    run,
    dataset,
    "offset",
    prompt_id,
    position,
    drafter,
    text_of(proposed_bytes) AS proposed,
    text_of(emitted_bytes) AS emitted,
    target_raw_probability AS proposed_probability,
    emitted_raw_probability AS emitted_probability,
    target_raw_entropy AS entropy,
    proposed_id,
    emitted_id
FROM decisions
WHERE outcome = 'rejected' AND target_raw_probability IS NOT NULL
QUALIFY row_number() OVER (PARTITION BY run ORDER BY proposed_probability DESC, "offset", position) <= 100
ORDER BY run, proposed_probability DESC, "offset", position;
