//! C++ text without what the compiler does not see, so that digests name the code and not its comments.

/// The text with each comment as white space, and white space only where tokens would be others without it. Literals stay as they are;
/// a preprocessor directive keeps a line of its own and its spaces, in which `F (x)` is not `F(x)`.
///
/// What differs in its tokens differs here. The converse holds but for operators that are written apart or together.
pub fn code_of(text: &str) -> String {
    let mut scan = Scan {
        text: text.chars().collect(),
        at: 0,
        code: String::with_capacity(text.len()),
        space: false,
        line_start: true,
        directive: false,
        word: String::new(),
    };
    while scan.next() {}
    scan.code
}

struct Scan {
    text: Vec<char>,
    at: usize,
    code: String,
    /// White space or a comment stands before what is next.
    space: bool,
    /// Nothing but white space and comments were on this line.
    line_start: bool,
    directive: bool,
    /// The identifier or number that ends here.
    word: String,
}

impl Scan {
    /// The character at `i`, and where the next one is. Lines that end in a backslash go on with the next.
    fn get(&self, mut i: usize) -> Option<(char, usize)> {
        loop {
            match (
                self.text.get(i)?,
                self.text.get(i + 1),
                self.text.get(i + 2),
            ) {
                ('\\', Some('\n'), _) => i += 2,
                ('\\', Some('\r'), Some('\n')) => i += 3,
                (c, _, _) => return Some((*c, i + 1)),
            }
        }
    }

    /// Takes a token, part of one, white space or a comment.
    fn next(&mut self) -> bool {
        let Some((c, next)) = self.get(self.at) else {
            return false;
        };
        let after = self.get(next);
        self.at = next;
        match (c, after) {
            ('\n', _) => {
                if self.directive {
                    self.code.push('\n');
                }
                self.directive = false;
                self.line_start = true;
                self.blank();
            }
            (c, _) if c.is_whitespace() => self.blank(),
            ('/', Some(('/', _))) => {
                while let Some((_, next)) = self.get(self.at).filter(|(c, _)| *c != '\n') {
                    self.at = next;
                }
                self.blank();
            }
            ('/', Some(('*', next))) => {
                self.at = next;
                let mut star = false;
                while let Some((c, next)) = self.get(self.at) {
                    self.at = next;
                    if star && c == '/' {
                        break;
                    }
                    star = c == '*';
                }
                self.blank();
            }
            ('"', _) if ["R", "LR", "uR", "UR", "u8R"].contains(&self.word.as_str()) => self.raw(),
            ('"', _) => self.literal('"'),
            // Not one that separates the digits of a number.
            ('\'', _) if !self.word.starts_with(|c: char| c.is_ascii_digit()) => self.literal('\''),
            (c, _) => self.push(c),
        }
        true
    }

    fn blank(&mut self) {
        self.space = true;
        self.word.clear();
    }

    fn push(&mut self, c: char) {
        let last = self.code.chars().next_back().filter(|c| *c != '\n');
        if c == '#' && self.line_start {
            self.directive = true;
            if last.is_some() {
                self.code.push('\n');
            }
        } else if let Some(last) = last.filter(|_| self.space)
            && (self.directive || are_one_token(last, c))
        {
            self.code.push(' ');
        }
        self.space = false;
        self.line_start = false;
        self.code.push(c);
        // A separator is part of its number, of which there may be more.
        if is_word(c) || c == '\'' {
            self.word.push(c);
        } else {
            self.word.clear();
        }
    }

    /// A string or character behind its opening quote, to the closing one or, if there is none, to the end of its line.
    fn literal(&mut self, quote: char) {
        self.push(quote);
        while let Some((c, next)) = self.get(self.at).filter(|(c, _)| *c != '\n') {
            self.code.push(c);
            self.at = next;
            if c == quote {
                break;
            }
            if c == '\\'
                && let Some((escaped, next)) = self.get(next)
            {
                self.code.push(escaped);
                self.at = next;
            }
        }
        self.word.clear();
    }

    /// A raw string behind its opening quote: `delimiter(...)delimiter"`. Nothing in it means anything else.
    fn raw(&mut self) {
        self.push('"');
        let rest = &self.text[self.at..];
        let open = rest.iter().position(|c| *c == '(').unwrap_or(rest.len());
        let mut end: Vec<char> = vec![')'];
        end.extend(&rest[..open]);
        end.push('"');
        let close = (open..rest.len()).find(|i| rest[*i..].starts_with(&end));
        let length = close.map_or(rest.len(), |i| i + end.len());
        self.code.extend(&rest[..length]);
        self.at += length;
        self.word.clear();
    }
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || matches!(c, '_' | '$' | '\\' | '@' | '`') || !c.is_ascii()
}

/// True if two characters beside each other may belong to one token, which they do not with a space between them.
fn are_one_token(a: char, b: char) -> bool {
    let of_literal = |c: char| is_word(c) || matches!(c, '"' | '\'' | '.');
    let of_operator = |c: char| "+-*/%&|^=<>!:#.?~".contains(c);
    let exponent = |c: char| matches!(c, 'e' | 'E' | 'p' | 'P');
    of_literal(a) && of_literal(b)
        || of_operator(a) && of_operator(b)
        || exponent(a) && matches!(b, '+' | '-')
}

#[cfg(test)]
mod tests {
    use super::code_of;

    fn same(texts: &[&str]) {
        for text in texts {
            assert_eq!(code_of(text), code_of(texts[0]), "{text}");
        }
    }

    fn differ(a: &str, b: &str) {
        assert_ne!(code_of(a), code_of(b), "{a}\n{b}");
    }

    #[test]
    fn comments_and_white_space_do_not_count() {
        same(&[
            "int f(int a, int b) { return a / b; }\n#pragma unroll\nint c;\n",
            "// why\nint f(int a, int b) {\n  return a / b;  // not a * b\n}\n\n#pragma unroll // all\n  int c;",
            "/* \" ' */ int f(int /* , \n */ a, int b){return a/b;}\n  #pragma  unroll\n\n\tint c; // ends \\\n here too",
            "int f(int a, int b) { return a /**/ / /* // */ b; }\r\n#pragma unroll\r\nint c;\r\n",
            "in\\\nt f(int a, int b) { return a / b; }\n#pragma \\\n unroll\nint c; /\\\n/ gone\n /\\\n* gone *\\\n/",
        ]);
        assert_eq!(code_of("a  =  b ; // c"), "a=b;");
        assert_eq!(
            code_of("x\n#define A /* of\n two lines */ 1 // one\ny"),
            "x\n#define A 1\ny"
        );
        assert_eq!(code_of(""), "");
        assert_eq!(code_of("/* open"), "");
        assert_eq!(code_of("// open"), "");
    }

    #[test]
    fn what_comments_look_like_in_literals_counts() {
        for (a, b) in [
            (r#"f("a // b");"#, r#"f("a // c");"#),
            (r#"f("a /* b */");"#, r#"f("a");"#),
            (r#"f("\" // b");"#, r#"f("\" // c");"#),
            (r#"f("\\"); // b"#, r#"f("\\ // b");"#),
            (r#"f("a  b");"#, r#"f("a b");"#),
            ("f('\"', 1); // \"", "f('\"', 2); // \""),
            ("f('\\'', 1 /* ' */);", "f('\\'', 2 /* ' */);"),
            (
                "a = '/'; b = '/* 1'; c = '*/';",
                "a = '/'; b = '/* 2'; c = '*/';",
            ),
            ("n = 1'000 // '\n + 1;", "n = 1'000 // '\n + 2;"),
            ("f(R\"x(\" // 1)x\");", "f(R\"x(\" // 2)x\");"),
            ("f(u8R\"(\\\n)\");", "f(u8R\"()\");"),
            (
                "asm(\"{ // \\n\" : : \"r\"(a));",
                "asm(\"{ // \\n\" : : \"r\"(b));",
            ),
        ] {
            differ(a, b);
        }
        same(&["a = 'x'; // 'y'", "a = 'x';", "a = 'x'; /* \"*/"]);
        same(&["n = 1'000 /* it's */ + 1;", "n = 1'000 + 1;"]);
        same(&["n = 0xAB'CD'EF /* it's */ + 1;", "n = 0xAB'CD'EF + 1;"]);
        same(&["f(R\"(a)\", 1); // \"", "f(R\"(a)\", 1);"]);
        same(&["f(\"a\" /* \" */ \"b\");", "f(\"a\"\n \"b\");"]);
    }

    #[test]
    fn other_tokens_are_another_text() {
        for (a, b) in [
            ("int ab;", "int a b;"),
            ("a + +b;", "a ++b;"),
            ("a - -b;", "a --b;"),
            ("v<v<int> >", "v<v<int>>"),
            ("a = 0x1e +5;", "a = 0x1e+5;"),
            ("a & &b;", "a && b;"),
            ("1 .x", "1.x"),
            ("L 'a'", "L'a'"),
            ("a / *b", "a /*b*/"),
            ("#define F(x) x", "#define F (x) x"),
            ("#define A\nb", "#define A b"),
            ("a\n#define A", "a #define A"),
            ("#define A \\\n b\nc", "#define A\nb\nc"),
            ("x = 1;", "x = 2;"),
        ] {
            differ(a, b);
        }
        same(&["f(/* n = */ &a, /* m */ 3)", "f(&a, 3)"]);
    }
}
