SELECT drifts.run, drifts.dataset, drifts."offset", drifts.action, drifts.changed_at, drifts.description, recalls.version
FROM drifts LEFT JOIN recalls
    ON recalls.run = drifts.run AND recalls.target = drifts.target AND recalls."offset" = drifts."offset"
ORDER BY drifts.run, drifts.seq
