SELECT run, target, version, parent, reason, "offset", drafter_version, head_version, cache_version, cache_entries,
    memory_tokens, coalesce(drafter_digest, '') AS drafter_digest, changes, acceptance AS acceptance_before, folder,
    digest, probe_tokens, probe_greedy, probe_sampled, probe_forwards
FROM latest ORDER BY run, version
