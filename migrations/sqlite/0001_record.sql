-- Times and durations are microseconds; times count from 1970-01-01 00:00 UTC.
CREATE TABLE onceward_record (
    id BLOB PRIMARY KEY,
    namespace TEXT NOT NULL,
    subject TEXT NOT NULL,
    value TEXT NOT NULL,
    token TEXT NOT NULL,
    earlier_tokens BLOB NOT NULL,
    fence INTEGER NOT NULL,
    version INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    -- 1 in progress, 2 completed, 3 failed, 4 failed and retryable
    status INTEGER NOT NULL CONSTRAINT onceward_record_status CHECK (status BETWEEN 1 AND 4),
    resolved INTEGER NOT NULL,
    -- 1 retry, 2 hold
    on_expiry INTEGER NOT NULL CONSTRAINT onceward_record_on_expiry CHECK (on_expiry BETWEEN 1 AND 2),
    owner TEXT,
    fingerprint TEXT,
    origin TEXT,
    lock_ttl INTEGER NOT NULL,
    retention INTEGER NOT NULL,
    created_at INTEGER NOT NULL,
    locked_until INTEGER NOT NULL,
    finished_at INTEGER,
    -- When the record stops to count; null is never
    expires_at INTEGER,
    -- When the sweeper looks at the row
    purge_after INTEGER NOT NULL,
    checkpoint BLOB,
    checkpoint_sequence INTEGER,
    result_code INTEGER,
    -- JSON array of [name, value] pairs
    result_metadata TEXT,
    result_body BLOB
);

CREATE INDEX onceward_record_purge_after ON onceward_record (purge_after);
